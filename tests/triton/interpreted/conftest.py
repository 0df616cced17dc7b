"""Calls on CPU tensors go to Triton's kernels, by the honest interpreter."""

import pytest
from support import honest_interpreter

from tarnn.kernels.triton import launch, machine

honest_interpreter.install()


@pytest.fixture
def triton_kernels(monkeypatch, poisoned_memory):
    """They take calls on the CPU; what isn't written is NaN."""
    monkeypatch.setattr(machine, "interpreted", True)


@pytest.fixture(params=["whole", "split"])
def division(request, monkeypatch):
    """A sequence is one item, or each of its chunks is."""
    monkeypatch.setattr(launch, "processors", lambda device: 1 if request.param == "whole" else 10_000)
    return request.param
