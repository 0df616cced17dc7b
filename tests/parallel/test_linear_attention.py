"""Linear attention whose sequences several processes share: the numbers of one process."""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import relative_error
from support.rank_cases import checkpointed, twice
from support.stretch_cases import Call, by_one, in_float64, joined, on_rank

from tarnn import Elu, linear_attention

CALLS = {
    "plain": Call(),
    "equal stretches": Call(lengths=(16, 16, 16, 16)),
    "stretches without tokens": Call(lengths=(0, 31, 0, 18)),
    "no token at all": Call(lengths=(0, 0, 0, 0)),
    "two ranks": Call(lengths=(29, 24)),
    "one rank": Call(lengths=(53,)),
    "no state wanted": Call(state_wanted=False),
    "decay per head": Call(decay="head"),
    "decay per token": Call(decay="token resets", masked=True),
    "decay per channel": Call(decay="channel resets", masked=True, state="sums"),
    "log-weights": Call(weighted=True, masked=True, spread=3.0),
    "log-weights, decay, state": Call(weighted=True, decay="token", state="maxima"),
    "log-weights, decay per channel": Call(weighted=True, decay="channel", state="sums"),
    "a state with maxima": Call(state="maxima", decay="head"),
    "shared keys": Call(h=6, g=2, m=2, decay="token", masked=True),
    "grouped values": Call(h=2, g=2, m=6, decay="token", weighted=True, state="sums"),
    "FAVOR+": Call(feature_map="favor", state="sums", masked=True, spread=2.0),
    "FAVOR+, undivided, with decay": Call(feature_map="favor", normalize=False, decay="token"),
    "exponentials, decay per channel": Call(feature_map="exp", decay="channel", weighted=True, spread=3.0),
    "a map of one's own": Call(feature_map="own", decay="token", state="sums"),
    "Hedgehog": Call(feature_map="hedgehog", h=4, decay="channel"),
    "DPFP": Call(feature_map="dpfp", masked=True),
    "clusters": Call(feature_map="clusters", decay="token", masked=True, state="sums", spread=4.0),
    "undivided": Call(feature_map="identity", normalize=False, state="sums", decay="token"),
    "divided by one at least": Call(feature_map="identity", normalize="at_least_one", decay="token", weighted=True),
}
FULL = {
    "plain": Call(causal=False),
    "stretches without tokens": Call(causal=False, lengths=(0, 31, 0, 18), masked=True),
    "two ranks": Call(causal=False, lengths=(29, 24), state_wanted=False),
    "log-weights, masks, a state": Call(causal=False, weighted=True, masked=True, state="maxima", spread=3.0),
    "FAVOR+": Call(causal=False, feature_map="favor", state="sums", h=4),
    "a map of one's own": Call(causal=False, feature_map="own", masked=True),
    "clusters": Call(causal=False, feature_map="clusters", masked=True, state="sums", spread=4.0),
    "grouped values": Call(causal=False, h=2, g=2, m=4, weighted=True),
    "undivided": Call(causal=False, feature_map="exp", normalize=False),
}
PACKED = {  # ranks begin at 0, 13, 20, 40 and end at 49
    "over all ranks": (0, 49),
    "some over ranks": (0, 5, 17, 38, 44, 49),
    "ends where ranks end": (0, 13, 20, 40, 49),
    "one over three ranks": (0, 11, 45, 49),
    "empty ones": (0, 0, 13, 13, 25, 25, 25, 40, 49, 49),
    "many on one rank": (0, 1, 2, 3, 49),
}


def check(processes, call, bound=1e-12):
    whole = by_one(call)
    parts = joined(call, processes.run(on_rank, call, ranks=len(call.lengths)))
    assert parts.keys() == whole.keys()
    errors = {name: relative_error(parts[name], whole[name]) for name in whole}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("name", CALLS)
def test_causal_attention_is_that_of_one_process(processes, name):
    check(processes, CALLS[name])


@pytest.mark.parametrize("name", FULL)
def test_attention_to_both_sides_is_that_of_one_process(processes, name):
    check(processes, FULL[name])


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("state", ["", "maxima"])
def test_packed_sequences_cross_ranks(processes, name, state):
    cuts = PACKED[name]
    check(processes, Call(b=1, cuts=cuts, decay="token", masked=True, state=state))
    check(processes, Call(b=1, cuts=cuts, weighted=True, decay="channel", state=state, state_wanted=False))
    check(processes, Call(b=1, cuts=cuts, causal=False, masked=True, state=state))
    check(processes, Call(b=1, cuts=cuts, causal=False, weighted=True, state=state, state_wanted=False))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", ["own", "clusters"])
def test_packed_sequences_of_maps_that_kernels_do_not_know(processes, feature_map, causal):
    decay = "token" if causal else ""
    call = Call(b=1, cuts=PACKED["some over ranks"], feature_map=feature_map, causal=causal, decay=decay, masked=True)
    check(processes, call)
    check(processes, replace(call, lengths=(0, 20, 29), state="sums"))


@pytest.mark.parametrize("name", ["plain", "log-weights, decay, state", "FAVOR+", "decay per channel"])
def test_float32_errs_as_much_as_one_process(processes, name):
    call = replace(CALLS[name], dtype="float32", lengths=(130, 70, 200, 90))
    exact, whole = by_one(in_float64(call)), by_one(call)
    parts = joined(call, processes.run(on_rank, call))
    for part, expected in exact.items():
        mine, theirs = relative_error(parts[part], expected), relative_error(whole[part], expected)
        assert mine < 2 * theirs + 1e-6, (part, mine, theirs)


@pytest.mark.parametrize("name", ["plain", "decay per token", "FAVOR+"])
def test_bfloat16_errs_as_much_as_one_process(processes, name):
    call = replace(CALLS[name], dtype="bfloat16", lengths=(130, 70, 200, 90), state="", state_wanted=False)
    exact, whole = by_one(in_float64(call)), by_one(call)
    parts = joined(call, processes.run(on_rank, call))
    for part in ("o", "gradient of q", "gradient of k", "gradient of v"):
        mine, theirs = relative_error(parts[part], exact[part]), relative_error(whole[part], exact[part])
        assert mine < 2 * theirs, (part, mine, theirs)


def test_activations_computed_again_are_those_of_the_ranks(processes):
    call = Call(decay="token", state_wanted=False)
    whole = by_one(call)
    parts = joined(call, processes.run(checkpointed, call))
    assert "gradient of log_decay" in parts
    assert all(relative_error(x, whole[name]) < 1e-12 for name, x in parts.items())


def test_the_same_bits_each_time(processes):
    call = replace(CALLS["log-weights, decay, state"], dtype="float32")
    first, second = (processes.run(on_rank, call) for _ in range(2))
    assert all(torch.equal(x[name], y[name]) for x, y in zip(first, second) for name in x)


def test_second_derivatives(processes):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 11, 3, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    o = linear_attention(whole, whole, whole, Elu(), causal=True)
    first = torch.autograd.grad(o.square().sum(), whole, create_graph=True)[0]
    expected = torch.autograd.grad(first.square().sum(), whole)[0]
    assert relative_error(torch.cat(processes.run(twice, x), 2), expected) < 1e-12
