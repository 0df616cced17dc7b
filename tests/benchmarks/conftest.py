"""The benchmark scripts, run in this process with tiny sizes."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def script(capsys, monkeypatch, tmp_path):
    """script(name, *options) → (exit code, stdout, stderr); results go to tmp_path."""
    threads = torch.get_num_threads()

    def run(name, *options):
        argv = [f"{name}.py", "--threads", "1", "--out", str(tmp_path), *map(str, options)]
        monkeypatch.setattr(sys, "argv", argv)
        code = importlib.import_module(name).main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def wrong_gradients(monkeypatch):
    """The second of the two ways to compute a model's step is off by a thousandth."""
    model_steps = importlib.import_module("model_steps")
    right, calls = model_steps.step, []

    def wrong(model, tokens):
        calls.append(1)
        return right(model, tokens) * (1.001 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(model_steps, "step", wrong)
