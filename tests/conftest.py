"""What all suites share."""

import os
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest
import torch
from support import browser as browsers

ROOT = Path(__file__).parents[1]
os.environ.setdefault("TARNN_BYTES_A_THREAD", "0")  # else small models have one thread, whatever a test tells them
os.environ.setdefault("TARNN_BLOCK_ROWS", "64")  # else prompts of tests are a single block
hypothesis.settings.register_profile("no deadline", deadline=None)  # nothing may depend on the machine's speed
hypothesis.settings.load_profile("no deadline")


def pytest_addoption(parser):
    about = "of tests with ten cases or more, a third of the cases, in the suites that have most of them (make test)"
    parser.addoption("--third", action="store_true", help=about)


def pytest_configure(config):
    """What torch.compile makes is made by this run, not found from an earlier one; xdist's workers inherit the folder."""
    if not hasattr(config, "workerinput"):
        compiled = tempfile.TemporaryDirectory(prefix="tarnn-compiled-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
        config.add_cleanup(compiled.cleanup)


SCRIPTS = {"benchmarks", "experiments"}  # which no user imports: tests/scripts opens them at each commit
THINNED = {"ops", "kernels", "huggingface", "decoding", "families", "feature_maps"}
MANY = 10  # cases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if SCRIPTS & set(item.path.relative_to(ROOT).parts):
            item.add_marker("slow")
    if config.getoption("--third"):
        left_out = cases_left_out(items)
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def cases_left_out(items):
    """Two thirds of the cases of each test that has many. Which, goes by their names: the same on every machine."""
    of_test = defaultdict(list)
    for item in items:
        if item.path.relative_to(ROOT).parts[1] in THINNED:
            of_test[item.nodeid.partition("[")[0]].append(item)
    many = [sorted(x, key=lambda item: zlib.crc32(item.nodeid.encode())) for x in of_test.values() if len(x) >= MANY]
    return {item for cases in many for item in cases[-(-len(cases) // 3) :]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not browsers.is_there():
        pytest.skip(browsers.MISSING)
    one = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


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


@pytest.fixture
def tarnn(capsys):
    """tarnn(*argv) → (exit code, stdout, stderr), in this process."""
    from tarnn.cli.main import main

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*argv):
        code = main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    torch.set_num_threads(threads)
