"""Layers over sequences that several processes share: the numbers of one process. And what has no such form, refused by name."""

import re

import pytest
from support.attention_cases import relative_error
from support.layer_stretches import REFUSED, Layer, by_one, joined, left_behind, on_rank, refused

LAYERS = {
    "linear": Layer("linear", masked=True),
    "rotated queries and keys": Layer("linear", (("feature_map", "favor"),), rotary=8, masked=True),
    "rotated features": Layer("linear", (("normalize", False), ("decay", True)), rotary=8),
    "positions in the map": Layer("linear", (("feature_map", "cosformer"),), masked=True),
    "to both sides": Layer("linear", (("causal", False),), rotary=8, masked=True),
    "softmax": Layer("softmax", rotary=8, masked=True),
    "softmax to both sides": Layer("softmax", (("causal", False),)),
    "a window": Layer("window", (("window", 3), ("sinks", 1)), rotary=8, masked=True),
    "gated delta": Layer("gated_delta", masked=True),
    "Mamba-2": Layer("mamba2", masked=True),
}


def check(processes, case):
    whole = by_one(case)
    parts = joined(processes.run(on_rank, case, ranks=len(case.lengths)))
    assert parts.keys() == whole.keys()
    errors = {name: relative_error(parts[name], whole[name]) for name in whole}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_one_process(processes, name):
    check(processes, LAYERS[name])


@pytest.mark.parametrize("name", ["linear", "rotated features", "softmax", "a window", "gated delta", "Mamba-2"])
def test_packed_sequences_of_a_layer(processes, name):
    case = LAYERS[name]
    check(processes, Layer(case.kind, case.options, case.rotary, cuts=(0, 3, 9, 16, 20)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(processes, name):
    for outcome in processes.outcomes(refused, name, ranks=2):
        assert outcome.kind == "NotImplementedError", outcome.trace
        assert re.search(REFUSED[name][1], outcome.message), outcome.message


def test_everything_is_back_in_its_place_after_the_context(processes):
    assert processes.run(left_behind, ranks=2) == [[], []]
