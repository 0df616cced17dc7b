"""What the op's tests share: ways to compute and devices, poisoned memory, chunk sizes."""

import contextlib

import pytest
import torch
from support.chunks import tiny_chunks

from tarnn.kernels.cpu import library

PATHS = ["compiled", "PyTorch", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_generate_tests(metafunc):
    """Every test of the op runs by the compiled kernels, in plain PyTorch, and on every other device there is.

    What is marked `one_path` runs once, by whatever serves: the marked code comes before or around the kernels.
    """
    once = metafunc.definition.get_closest_marker("one_path") is not None
    metafunc.parametrize("path", ["any", *PATHS[2:]] if once else PATHS, indirect=True)


@pytest.fixture(autouse=True)
def path(request, poisoned_memory):
    """How the test's calls are computed: "compiled", "PyTorch", "any" of both, or "cuda"."""
    path = request.param
    if path == "compiled" and not library.available():
        pytest.skip(library.status().why)
    with library.disabled() if path == "PyTorch" else contextlib.nullcontext():
        yield path


@pytest.fixture(autouse=True)
def device(path):
    """Where the test's calls are computed: what it makes is made there."""
    device = path if path in PATHS[2:] else "cpu"
    if device != "cpu":
        torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture(params=["usual", "tiny"])
def chunks(request):
    """The usual chunk sizes, and tiny ones, with which a short sequence has many chunks, segments and stretches."""
    with tiny_chunks() if request.param == "tiny" else contextlib.nullcontext():
        yield request.param
