"""benchmarks/encoder_step.py with tiny sizes, and its targets."""

from types import SimpleNamespace

import encoder_step


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
