"""Calls on CPU tensors go to Triton's kernels, by the honest interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import honest_interpreter

from tarnn.kernels.triton import device, launch

honest_interpreter.install()


@pytest.fixture
def triton_kernels(monkeypatch, poisoned_memory):
    """They take calls on the CPU; what isn't written is NaN."""
    monkeypatch.setattr(device, "interpreted", True)


@pytest.fixture
def divided(monkeypatch):
    """A function that makes a sequence one item ("whole"), or each of its chunks one ("split")."""

    def divide(how: str) -> None:
        monkeypatch.setattr(launch, "processors", lambda device: 1 if how == "whole" else 10_000)

    return divide


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A function that gives a module of kernels with a fault in it."""

    def plant(kernels: ModuleType, right: str, wrong: str) -> ModuleType:
        source = Path(kernels.__file__).read_text()
        assert right in source
        file = tmp_path / "faulty.py"
        file.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location("faulty", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "faulty", module)
        spec.loader.exec_module(module)
        return module

    return plant
