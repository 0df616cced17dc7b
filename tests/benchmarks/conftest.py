"""The benchmark scripts, run in this process with tiny sizes."""

import importlib

import pytest
from support.scripts import data_of, folder, pictures, script  # noqa: F401  fixtures


@pytest.fixture
def wrong_gradients(monkeypatch):
    """The second of the two ways to compute a model's step is off by a thousandth."""
    model_steps = importlib.import_module("model_steps")
    right, calls = model_steps.step, []

    def wrong(model, tokens):
        calls.append(1)
        return right(model, tokens) * (1.001 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(model_steps, "step", wrong)
