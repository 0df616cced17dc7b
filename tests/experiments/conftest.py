"""The experiments' scripts, run in this process with tiny sizes; real data where they are beside the repository."""

from pathlib import Path

import pytest
from support.scripts import data_of, folder, pictures, script  # noqa: F401  fixtures

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data():
    """data(name): a file or folder of the shared data; the test is skipped where there is none."""

    def find(name):
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"no {path}")
        return path

    return find
