"""What the op's tests share: devices, poisoned memory, chunk sizes."""

import pytest
import torch

from tarnn.kernels import eager

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    """Every test of the op runs on every device there is: what it makes is made there."""
    if request.param != "cpu":
        torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """torch.empty is filled with NaN, so that an output that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["usual", "tiny"])
def chunks(request, monkeypatch):
    """The usual chunk sizes, and tiny ones, with which a short sequence has many chunks and segments."""
    if request.param == "tiny":
        monkeypatch.setattr(eager, "CHUNK", 4)
        monkeypatch.setattr(eager, "CHUNK_WITH_CHANNELS", 3)
        monkeypatch.setattr(eager, "SEGMENT", 0)
        monkeypatch.setattr(eager, "SEGMENT_MIN", 8)
    return request.param
