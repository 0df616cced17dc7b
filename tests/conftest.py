"""What all suites share."""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parents[1]
hypothesis.settings.register_profile("no deadline", deadline=None)  # nothing may depend on the machine's speed
hypothesis.settings.load_profile("no deadline")


def pytest_configure(config):
    """What torch.compile makes is made by this run, not found from an earlier one; xdist's workers inherit the folder."""
    if not hasattr(config, "workerinput"):
        compiled = tempfile.TemporaryDirectory(prefix="tarnn-compiled-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
        config.add_cleanup(compiled.cleanup)


SCRIPTS = {"benchmarks", "experiments"}  # which no user imports: tests/scripts opens them at each commit


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if SCRIPTS & set(item.path.relative_to(ROOT).parts):
            item.add_marker("slow")


@pytest.fixture
def poisoned_memory():
    """torch.empty is filled with NaN, so that an output that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def data():
    """data(name): a file or folder of the shared data; the test is skipped where there is none."""

    def find(name):
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"no {path}")
        return path

    return find
