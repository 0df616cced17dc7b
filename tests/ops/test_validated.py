"""Checks are made once for each kind of arguments, and whatever they look at makes another kind."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tarnn import Elu, LinearState, delta_rule, linear_attention, step
from tarnn.ops.validated import skip_repeated_checks


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    S: Tensor | None
    scale: float


@pytest.fixture
def counted():
    """A function from arguments to a call, and the arguments that it has checked."""
    checked = []

    @skip_repeated_checks
    def make_call(q, k, state, scale):
        checked.append(scale)
        return Call(q, k.float(), None if state is None else state.S, float(scale))

    return make_call, checked


def test_equal_arguments_are_checked_once_and_their_tensors_taken_as_they_are(counted):
    make_call, checked = counted
    state = LinearState.zeros(1, 2, 3, 4)
    for q, k in [torch.rand(2, 2, 3), [torch.rand(2, 3)] * 2, torch.rand(2, 2, 3)]:
        call = make_call(q, k, state, 2)
        assert call.q is q
        assert call.k is k
        assert call.S is state.S
        assert call.scale == 2.0
    assert checked == [2]


def test_whatever_checks_look_at_makes_another_kind(counted):
    make_call, checked = counted
    q, state = torch.rand(2, 3), LinearState.zeros(1, 2, 3, 4)
    for arguments in [
        (q, q, None, 1.0),
        (q, q, None, 1),
        (q, q, None, True),
        (q[1:], q, None, 1.0),
        (q.double(), q, None, 1.0),
        (q, q, state, 1.0),
        (q, q, LinearState.zeros(2, 2, 3, 4), 1.0),
    ]:
        make_call(*arguments)
    assert len(checked) == 7


def test_arguments_that_are_cast_or_traced_are_checked_each_time(counted):
    make_call, checked = counted
    q = torch.rand(2, 3)
    for _ in range(2):
        make_call(q, q.double(), None, 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            make_call(q, q, None, 1.0)
        torch.func.vmap(lambda x: make_call(x, x, None, 1.0).q)(q)
    assert len(checked) == 6


def test_an_op_refuses_what_comes_after_a_call_that_was_fine():
    q, state = torch.rand(1, 2, 1, 4), LinearState.zeros(1, 2, 4, 4)
    for _ in range(2):
        step(q, q, q, Elu(), state)
        with pytest.raises(ValueError, match="the state's S must be"):
            step(q, q, q, Elu(), LinearState.zeros(2, 2, 4, 4))
        with pytest.raises(TypeError, match="one floating dtype"):
            step(q, q, q.double(), Elu(), state)
        with pytest.raises(ValueError, match="negative weights"):
            linear_attention(q, q, q, "identity", causal=True)
    beta = torch.rand(1, 2, 1)
    for _ in range(2):
        delta_rule(q, q, q, beta)
        with pytest.raises(ValueError, match="beta must be from 0 to 2"):  # numbers are looked at each time
            delta_rule(q, q, q, beta + 3)
