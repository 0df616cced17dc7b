"""What ranks send each other: by a formula, whatever the length; and as the system counts it."""

from dataclasses import replace

import pytest
from support.op_stretches import Case
from support.rank_cases import bytes_of_call, bytes_of_case
from support.stretch_cases import Call

ABOUT = 16  # bytes in which a rank says what it is about to compute
OVERHEAD = 8192  # of gloo's own messages for a call, at most

WIDE = Call(lengths=(50, 50, 50, 50), b=1, h=8, g=8, m=8, d=32, e=32, dtype="float32", state_wanted=False)
CALLS = {
    "256 channels, 8 heads": (WIDE, 8 * 32 * 33),
    "three ranks, two rows": (replace(WIDE, lengths=(50, 1, 50), b=2), 2 * 8 * 32 * 33),
    "decay per token": (replace(WIDE, decay="token"), 8 * (32 * 33 + 1)),
    "decay per channel, log-weights": (replace(WIDE, decay="channel", weighted=True), 8 * (32 * 33 + 2 * 32)),
    "packed": (replace(WIDE, cuts=(0, 10, 20, 70, 190, 200)), 8 * 32 * 33),
    "packed without a sequence on two ranks": (replace(WIDE, cuts=(0, 50, 100, 150, 200)), 0),
}
# of two rows with two heads, keys of four channels, values of three; scans and filters have five channels
WINDOW = (("window", 5), ("sinks", 3))
OTHERS = {  # the numbers of a rank
    "delta_rule": (Case("delta_rule", decay="token"), 2 * 2 * 4 * (3 + 4)),
    "low_rank_delta_rule": (Case("low_rank_delta_rule"), 2 * 2 * 4 * (3 + 4)),
    "diagonal_scan": (Case("diagonal_scan"), 2 * 2 * 5),
    "selective_scan": (Case("selective_scan"), 2 * 2 * 5 * 3),
    "short_convolution": (Case("short_convolution"), 2 * (3 * 5 + 1)),
    "short_convolution, centred": (Case("short_convolution", options=(("causal", False),)), 2 * (3 * 5 + 2)),
    "softmax_attention": (Case("softmax_attention"), 2 * 2 * 20 * (4 + 3)),  # of the longest stretch
    "hybrid_attention": (Case("hybrid_attention", options=WINDOW), 2 * (2 * (8 * (4 + 3 + 1) + 1) + 1)),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_ops_send_what_their_formula_says(processes, name, backward):
    case, numbers = OTHERS[name]
    case = replace(case, dtype="float32", state_wanted=False)
    expected = (len(case.lengths) - 1) * (ABOUT + 4 * numbers * (2 if backward else 1))
    for said, counted in processes.run(bytes_of_case, case, backward):
        assert said == expected
        assert expected <= counted <= expected + OVERHEAD


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_causal_call_sends_a_state_for_each_other_rank(processes, name, backward):
    call, numbers = CALLS[name]
    others = len(call.lengths) - 1
    expected = others * (ABOUT + 4 * numbers * (2 if backward else 1))
    for said, counted in processes.run(bytes_of_call, call, backward, ranks=len(call.lengths)):
        assert said == expected
        assert expected <= counted <= expected + OVERHEAD


def test_its_bytes_do_not_depend_on_the_length(processes):
    longer = replace(WIDE, lengths=(700, 20, 1, 300))
    said = [[sent for sent, _ in processes.run(bytes_of_call, call, True)] for call in (WIDE, longer)]
    assert said[0] == said[1]


def test_attention_to_both_sides_sends_one_sum(processes):
    call, numbers = replace(WIDE, causal=False), 8 * 32 * 33
    for said, counted in processes.run(bytes_of_call, call, True):
        expected = 3 * ABOUT + 2 * (2 * 3 * 4 * numbers // 4)  # a sum over four ranks, forward and backward
        assert said == expected
        assert expected <= counted + OVERHEAD
        assert counted <= expected + OVERHEAD
