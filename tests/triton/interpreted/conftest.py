"""Calls on CPU tensors go to Triton's kernels, by the honest interpreter."""

import pytest
from support import honest_interpreter

from tarnn.kernels.triton import launch, machine

honest_interpreter.install()


@pytest.fixture
def triton_kernels(monkeypatch, poisoned_memory):
    """They take calls on the CPU; what isn't written is NaN."""
    monkeypatch.setattr(machine, "interpreted", True)


@pytest.fixture
def divided(monkeypatch):
    """A function that makes a sequence one item ("whole"), or each of its chunks one ("split")."""

    def divide(how: str) -> None:
        monkeypatch.setattr(launch, "processors", lambda device: 1 if how == "whole" else 10_000)

    return divide
