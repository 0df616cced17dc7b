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
    "token_shift": {"plain": Case("token_shift"), "masked": Case("token_shift", masked=True)},
}
HYBRID = {
    "without features": (("window", 5),),
    "sinks and features": (("window", 5), ("sinks", 3), ("feature_map", "favor")),
    "a window longer than stretches": (("window", 11), ("sinks", 2), ("feature_map", "favor")),
    "slots": (("window", 4), ("sinks", 1), ("slots", 3), ("feature_map", "favor")),
    "slots without features": (("window", 4), ("slots", 3)),
    "maxima per feature": (("window", 4), ("slots", 2), ("feature_map", "clusters")),
    "an end of the far part": (("window", 3), ("feature_map", "favor"), ("far_until", 30)),
}
SIDES = {
    "a window": (("window", 5),),
    "a window of one": (("window", 1), ("feature_map", "favor")),
    "sinks": (("window", 4), ("sinks", 15)),
    "global tokens": (("window", 3), ("sinks", 2), ("global_tokens", (0, 15, 48))),
    "a mask of global tokens": (("window", 3), ("sinks", 1), ("global_tokens", "mask"), ("feature_map", "favor")),
    "exact queries": (("window", 4), ("exact_queries", (0, 21)), ("feature_map", "favor")),
    "features": (("window", 5), ("feature_map", "favor")),
    "a window longer than stretches": (("window", 11), ("sinks", 2), ("feature_map", "favor")),
    "slots": (("window", 4), ("sinks", 1), ("slots", 3), ("feature_map", "favor")),
    "slots without features": (("window", 4), ("slots", 3), ("global_tokens", "mask")),
    "maxima per feature": (("window", 4), ("slots", 20), ("sinks", 3), ("feature_map", "clusters")),
    "an end of the far part": (("window", 3), ("feature_map", "favor"), ("far_until", 30)),
    "nothing estimated": (("window", 3), ("feature_map", "favor"), ("far_until", 90), ("softcap", 2.0)),
}
PLAIN = [case for cases in CASES.values() for case in cases.values()]


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


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_attention(processes, name):
    case = Case("hybrid_attention", options=HYBRID[name])
    check(processes, case)
    check(processes, replace(case, decay="token", masked=True, state=True, lengths=(13, 0, 27, 9)))
    check(processes, replace(case, decay="token", state_wanted=False, lengths=(29, 0, 24)))


@pytest.mark.parametrize("cuts", PACKED)
def test_packed_sequences_of_hybrid_attention(processes, cuts):
    case = Case("hybrid_attention", options=HYBRID["slots"], cuts=PACKED[cuts])
    check(processes, case)
    check(processes, replace(case, options=HYBRID["sinks and features"], decay="token", masked=True, state=True))


@pytest.mark.parametrize("name", SIDES)
def test_hybrid_attention_to_both_sides(processes, name):
    case = Case("hybrid_attention", options=(("causal", False), *SIDES[name]), heads=(4, 2))
    check(processes, case)
    check(processes, replace(case, masked=True, lengths=(13, 0, 27, 9)))
    check(processes, replace(case, masked=True, lengths=(1, 52)))


@pytest.mark.parametrize("cuts", PACKED)
@pytest.mark.parametrize("name", ["global tokens", "slots", "a mask of global tokens"])
def test_packed_sequences_of_hybrid_attention_to_both_sides(processes, name, cuts):
    case = Case("hybrid_attention", options=(("causal", False), *SIDES[name]), cuts=PACKED[cuts])
    check(processes, case)
    check(processes, replace(case, masked=True, lengths=(13, 0, 27, 9)))


@pytest.mark.parametrize("op", [*CASES, "hybrid_attention"])
def test_float32_errs_as_much_as_one_process(processes, op):
    cases = CASES.get(op, {"": Case(op, options=HYBRID["sinks and features"], decay="token", masked=True)})
    case = replace(list(cases.values())[-1], dtype="float32", lengths=(130, 70, 200, 90))
    exact, whole = by_one(replace(case, dtype="float64")), by_one(case)
    parts = joined(case, processes.run(on_rank, case))
    for name, expected in exact.items():
        mine, theirs = (relative_error(x[name], expected) for x in (parts, whole))
        assert mine < 2 * theirs + 1e-6, (name, mine, theirs)
