"""The other ops over sequences that several processes share: the numbers of one process."""

from dataclasses import replace

import pytest
from support.attention_cases import relative_error
from support.op_stretches import Case, by_one, joined, on_rank

PACKED = {  # ranks begin at 0, 13, 20, 40 and end at 49
    "over all ranks": (0, 49),
    "some over ranks": (0, 5, 17, 38, 44, 49),
    "ends where ranks end": (0, 13, 20, 40, 49),
    "one over three ranks": (0, 11, 45, 49),
    "empty ones": (0, 0, 13, 13, 25, 25, 25, 40, 49, 49),
    "many on one rank": (0, 1, 2, 3, 49),
}
CASES = {
    "delta_rule": {
        "plain": Case("delta_rule"),
        "decay per token": Case("delta_rule", decay="token resets", masked=True, state=True),
        "decay per channel": Case("delta_rule", decay="channel resets", state_wanted=False),
        "grouped values": Case("delta_rule", heads=(2, 4), decay="token", state=True),
        "shared keys": Case("delta_rule", heads=(4, 2), masked=True),
    },
    "low_rank_delta_rule": {
        "plain": Case("low_rank_delta_rule"),
        "decay per channel": Case("low_rank_delta_rule", decay="channel resets", masked=True, state=True),
        "no state wanted": Case("low_rank_delta_rule", decay="token", state_wanted=False),
    },
    "short_convolution": {
        "plain": Case("short_convolution"),
        "masks and a state": Case("short_convolution", masked=True, state=True),
        "wider than stretches": Case("short_convolution", options=(("width", 17),), masked=True, state=True),
        "of one token": Case("short_convolution", options=(("width", 1),)),
        "to both sides": Case("short_convolution", options=(("causal", False),)),
        "to both sides, wide, masked": Case(
            "short_convolution", options=(("causal", False), ("width", 18)), masked=True
        ),
    },
    "diagonal_scan": {
        "plain": Case("diagonal_scan", state_wanted=False),
        "masks and a state": Case("diagonal_scan", decay="token resets", masked=True, state=True),
    },
    "selective_scan": {
        "plain": Case("selective_scan", state_wanted=False),
        "masks and a state": Case("selective_scan", masked=True, state=True),
    },
    "softmax_attention": {
        "plain": Case("softmax_attention", heads=(4, 2)),
        "masks and a state": Case("softmax_attention", masked=True, state=True),
        "log-weights": Case("softmax_attention", options=(("weighted", True),), masked=True),
        "to both sides": Case("softmax_attention", options=(("causal", False),), masked=True, state_wanted=False),
    },
}
WINDOWS = {
    "a window": (("window", 5),),
    "a window of one": (("window", 1),),
    "sinks": (("window", 4), ("sinks", 15)),
    "a window longer than stretches": (("window", 11), ("sinks", 2), ("softcap", 2.0)),
}


def check(processes, case, bound=1e-12):
    whole = by_one(case)
    parts = joined(case, processes.run(on_rank, case, ranks=len(case.lengths)))
    assert parts.keys() == whole.keys()
    errors = {name: relative_error(parts[name], whole[name]) for name in whole}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, cases in CASES.items() for name in cases])
def test_stretches_are_the_whole(processes, op, name):
    case = CASES[op][name]
    check(processes, case)
    check(processes, replace(case, lengths=(0, 31, 0, 18)))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("cuts", PACKED)
def test_packed_sequences_cross_ranks(processes, op, cuts):
    case = list(CASES[op].values())[-1]
    if op == "softmax_attention":
        case = replace(case, masked=False, state=False)
    check(processes, replace(case, cuts=PACKED[cuts]))
    case = replace(next(iter(CASES[op].values())), masked=op != "softmax_attention", state=op != "softmax_attention")
    check(processes, replace(case, cuts=PACKED[cuts]))


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(processes, name):
    case = Case("hybrid_attention", options=WINDOWS[name], heads=(4, 2))
    check(processes, case)
    check(processes, replace(case, decay="token", masked=True, state=True, lengths=(13, 0, 27, 9)))
    check(processes, replace(case, decay="token", state_wanted=False, lengths=(29, 0, 24)))
    check(processes, replace(case, state=True, lengths=(1, 1, 1)))


@pytest.mark.parametrize("cuts", PACKED)
def test_packed_sequences_of_windows(processes, cuts):
    case = Case("hybrid_attention", options=WINDOWS["a window"], cuts=PACKED[cuts])
    check(processes, case)
    check(processes, replace(case, options=WINDOWS["sinks"], decay="token", masked=True, state=True))


@pytest.mark.parametrize("op", [*CASES, "hybrid_attention"])
def test_float32_errs_as_much_as_one_process(processes, op):
    cases = CASES.get(op, {"": Case(op, options=WINDOWS["sinks"], decay="token", masked=True)})
    case = replace(list(cases.values())[-1], dtype="float32", lengths=(130, 70, 200, 90))
    exact, whole = by_one(replace(case, dtype="float64")), by_one(case)
    parts = joined(case, processes.run(on_rank, case))
    for name, expected in exact.items():
        mine, theirs = (relative_error(x[name], expected) for x in (parts, whole))
        assert mine < 2 * theirs + 1e-6, (name, mine, theirs)
