"""The experiments' scripts, run in this process with tiny sizes; real data where they are beside the repository."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))


@pytest.fixture
def script(capsys, monkeypatch, tmp_path):
    """script(name, *options) → (exit code, stdout); results go to tmp_path."""
    threads = torch.get_num_threads()

    def run(name, *options):
        argv = [f"{name}.py", "--threads", "1", "--out", str(tmp_path / "results"), *map(str, options)]
        monkeypatch.setattr(sys, "argv", argv)
        code = importlib.import_module(name).main()
        return code, capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def data():
    """data(name): a file or folder of the shared data; the test is skipped where there is none."""

    def find(name):
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"no {path}")
        return path

    return find
