"""benchmarks/encoder_step.py with tiny sizes, and its targets."""

from contextlib import contextmanager
from types import SimpleNamespace

import encoder_step
import pytest


def test_a_step_and_a_reading_are_measured(script, data_of):
    code, out, err = script("encoder_step", "--quick")
    assert code == 0, err
    found = data_of("encoder_step")["results"]
    assert set(found) == {"step 64", "step 128", "reading 2 x 32"}
    assert all(set(at) == set(encoder_step.METHODS) for at in found.values())
    assert "| step 128 |" in out


def test_targets_are_ratios_to_sdpa():
    def at(linear, softmax):
        return {"linear": SimpleNamespace(ms=linear), "softmax": SimpleNamespace(ms=softmax)}

    found = {"step 4096": at(10, 40), "step 8192": at(10, 79), "reading 8 x 512": at(10, 10)}
    assert [x.met for x in encoder_step.targets(found)] == [True, False, True]


def test_a_wrong_gradient_prints_no_figure(script, monkeypatch):
    right = encoder_step.model_steps.library.disabled
    monkeypatch.setattr(encoder_step.model_steps.library, "disabled", lambda: bent(right))
    code, _, err = script("encoder_step", "--quick")
    assert code == 1
    assert "the check is red: linear is off plain PyTorch by" in err


@contextmanager
def bent(right):
    """Plain PyTorch whose weights are others than those that the kernels saw."""
    with right(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_step.TarnnForMaskedLM, "forward", scaled(encoder_step.TarnnForMaskedLM.forward))
        yield


def scaled(forward):
    def call(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.loss = 1.01 * out.loss
        return out

    return call
