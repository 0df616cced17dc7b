"""Ranks that are about to compute different things, or nothing: one sentence on each, and no rank waits."""

import pytest
import torch.distributed as dist
from support.rank_cases import (
    numbers_of_no_backend,
    on_mesh,
    other_calls,
    other_models,
    own_error,
    places,
    sum_of_ones,
    wrong_shapes,
)
from support.ranks import Raised
from support.stretch_cases import Call

import tarnn
from tarnn.errors import UserError

CALL = Call()
DIFFERENCES = {
    "heads": ({"h": 4}, "q: .2, 2, t, 5. float64 on cpu on rank 0, 1, 2; .2, 4, t, 5. float64 on cpu on rank 3"),
    "width": ({"d": 7}, "different values of q"),
    "type": ({"dtype": "float32"}, "q: .* float64 on cpu on rank 0, 1, 2; .* float32 on cpu on rank 3"),
    "decay": ({"decay": "token"}, "log_decay: None on rank 0, 1, 2; .* on rank 3"),
    "map": ({"feature_map": "exp"}, "feature_map: Elu.* on rank 0, 1, 2; Exp.* on rank 3"),
    "state": ({"state": "sums"}, "state: None on rank 0, 1, 2; LinearState.* on rank 3"),
    "order": ({"causal": False}, "causal: True on rank 0, 1, 2; False on rank 3"),
    "returned state": ({"state_wanted": False}, "return_state: True on rank 0, 1, 2; False on rank 3"),
}


def same_sentence(outcomes, expected):
    import re

    assert all(isinstance(outcome, Raised) for outcome in outcomes), outcomes
    assert {outcome.kind for outcome in outcomes} <= {"UserError", "ValueError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert re.search(expected, outcomes[0].message), outcomes[0].message


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_make_different_calls(processes, name):
    changes, expected = DIFFERENCES[name]
    same_sentence(processes.outcomes(other_calls, CALL, changes), expected)
    assert processes.run(sum_of_ones) == [2.0, 4.0, 6.0, 8.0]  # and they go on


def test_ranks_whose_packed_sequences_differ(processes):
    call = Call(b=1, cuts=(0, 30, 49))
    same_sentence(
        processes.outcomes(other_calls, call, {"cuts": (0, 31, 49)}), "cu_seqlens: .0, 30, 49. on rank 0, 1, 2"
    )


def test_packed_sequences_that_are_not_those_of_all_ranks(processes):
    call = Call(b=1, cuts=(0, 13))
    same_sentence(processes.outcomes(other_calls, call, {}), "end with the number of packed tokens, 49; got .0, 13.")


def test_one_rank_refuses_its_input(processes):
    first, second = processes.outcomes(wrong_shapes, ranks=2)
    assert second.kind == "ValueError"
    assert "causal attention needs as many keys as queries" in second.message
    assert first.message.startswith("a rank refused its input. rank 1: causal attention needs as many keys as queries")
    assert processes.run(sum_of_ones, ranks=2) == [2.0, 4.0]


def test_an_error_of_the_program_itself_is_raised_at_once(processes):
    first, second = processes.outcomes(own_error, ranks=2)
    assert first is None
    assert (second.kind, "int()" in second.message) == ("ValueError", True)
    assert processes.run(sum_of_ones, ranks=2) == [2.0, 4.0]


@pytest.mark.parametrize(("difference", "name"), [("weights", "1.bias"), ("shape", "0.weight")])
def test_models_that_differ(processes, difference, name):
    same_sentence(
        processes.outcomes(other_models, difference, ranks=2), f"different values of {name}: .* on rank 0; .* on"
    )


def test_models_that_do_not(processes):
    processes.run(other_models, "none", ranks=2)


def test_a_backend_that_lacks_what_is_needed(processes):
    for outcome in processes.outcomes(numbers_of_no_backend, ranks=2):
        assert outcome.kind == "UserError"
        assert "needs all_gather of torch.int16 on cpu, and the group's backend, cpu:gloo" in outcome.message


def test_which_group_is_active(processes):
    inside, within, behind, _ = zip(*processes.run(places))
    assert (set(inside), set(within), set(behind)) == ({True}, {False}, {False})


def test_one_dimension_of_a_device_mesh(processes):
    totals, answers = zip(*processes.run(on_mesh))
    assert totals == (2.0, 4.0, 2.0, 4.0)
    assert set(answers) == {
        "one dimension of a device mesh shares sequences; got 2, ('data', 'sequence'). Pass mesh[name]."
    }


def test_a_stretch_is_as_long_as_the_others_can_be(processes):
    assert [part for *_, part in processes.run(places)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_a_process_that_has_not_joined():
    assert not dist.is_initialized()
    with pytest.raises(UserError, match=r"call torch\.distributed\.init_process_group"), tarnn.parallel.sequence():
        pass
