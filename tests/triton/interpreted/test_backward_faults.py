"""Faults planted in the kernels of the backward pass and of the step, and caught: by the interpreter, or by wrong numbers."""

import re
from functools import cache

import pytest
import torch
from support import honest_interpreter
from triton.runtime.errors import InterpreterError

from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call, Outputs, Returned
from tarnn.kernels.triton import backward_kernels, backward_pass, forward_kernels, launch, one_token, step_kernel

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# a fault: how sequences are cut, what is right, what is wrong, and what says so: the interpreter, or the numbers
RACE, BOUNDS, NUMBERS = "race", "outside of every tensor", ""
BACKWARD = {
    "r is written beyond the end": (
        "split", "tl.store(r + at + rows, factor, mask=live)", "tl.store(r + at + rows, factor)", RACE,
    ),
    "a query's gradient is stored beyond the end": (
        "whole", "store_rows(dq, row, h, t0, rows, inside,", "store_rows(dq, row, h, t0, rows, rows < spec.C,", RACE,
    ),
    "queries behind the end are read": (
        "split", "load_rows(grad_o, row, h, t0, rows, live, columns, spec.E)",
        "load_rows(grad_o, row, h, t0, rows, rows < 64, columns, spec.E)", BOUNDS,
    ),
    "a lane masked off is used": ("split", "r + rows, mask=live, other=0.0", "r + rows, mask=live", NUMBERS),
    "the last of the heads that share a key counts alone": (
        "split", "            state, sums = absorbed(state, sums, phi * seen",
        "            state, sums = absorbed(state * 0.0, sums, phi * seen", NUMBERS,
    ),
    "the last of the chunks counts alone": (
        "whole", "absorbed(state, sums, phi_q * seen", "absorbed(state * 0.0, sums, phi_q * seen", NUMBERS,
    ),
    "chunks are gone through from the first": (
        "whole", "t0 = start + (number - 1 - step) * spec.C", "t0 = start + step * spec.C", NUMBERS,
    ),
    "blocks of features write the same columns": (
        "whole", "block * spec.BF + tl.arange(0, spec.BF)", "tl.arange(0, spec.BF)", RACE,
    ),
    "blocks write one gradient of the state before": (
        "whole", "store_state(S_before + place * spec.F * spec.E, cf",
        "store_state(S_before + place * spec.F * spec.E, tl.arange(0, spec.BF)", RACE,
    ),
    "shares of ∂/∂w of blocks lie in one place": (
        "whole", "((block * B + row) * G + g)", "(row * G + g)", RACE,
    ),
    "an item begins with what its neighbour writes": (
        "split", "state, sums = tl.full((spec.BF, spec.BE), 0.0, tl.float32), tl.full((spec.BF,), 0.0, tl.float32)",
        "state = tl.full((spec.BF, spec.BE), 0.0, tl.float32); "
        "sums = tl.load(z + g * spec.F + cf, mask=cf < spec.F, other=0.0)", RACE,
    ),
}  # fmt: skip
PLAIN = {  # weights alone would leave out masked keys and later ones
    "a key has a gradient from queries before it": (
        "whole",
        "lower = rows[:, None] >= rows[None, :]",
        "lower = rows[:, None] >= rows[None, :] - 1",
        NUMBERS,
    ),
    "masked keys count": (
        "whole",
        "own = projection_of(projection, row, g)",
        "own, spec = projection_of(projection, row, g), spec._replace(masked=False)",
        NUMBERS,
    ),
}
DECAYED = {
    "the state's way through counts for each head": ("split", "if h % R != 0:", "if h < 0:", NUMBERS),
    "shares of blocks of features lie in one place": (
        "split",
        "shares + ((block * B + row) * H + h)",
        "shares + (row * H + h)",
        RACE,
    ),
    "a decay's gradient is stored beyond the end": (
        "split",
        "passing, mask=inside)",
        "passing, mask=rows < spec.C)",
        RACE,
    ),
}
PREFIX = {
    "gradients of states are summed from the first": (
        "split",
        "tl.where(REVERSE != 0, end - 1 - step, first + step)",
        "first + step",
        NUMBERS,
    )
}
STEP = {
    "z is stored beyond its end": (
        "z_new + place * spec.F + cf, sums, mask=live",
        "z_new + place * spec.F + cf, sums",
        RACE,
    ),
    "a value is read beyond the end": ("mask=ce < spec.E, other=0.0)", "mask=ce >= 0, other=0.0)", BOUNDS),
    "an output is stored beyond the end": ("element_ty), mask=ce < spec.E)", "element_ty))", RACE),
    "a program reads another one's state": ("tl.load(S + tile", "tl.load(S + tile % (spec.F * spec.E)", RACE),
    "the state is not kept": ("state = keep[:, None] * state +", "state = 0.0 * state +", NUMBERS),
    "one head alone of those that share a key": ("for head in range(R):", "for head in range(1):", NUMBERS),
}


OF = {"weighted": BACKWARD, "plain": PLAIN, "decayed": DECAYED}


@cache
def a_call(kind: str) -> Call:
    """Two chunks, two heads that share a key, two blocks of features; masked, continued."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 20, 70), torch.randn(1, 1, 20, 70), torch.randn(1, 1, 20, 40)
    decay, weight, state = -torch.rand(1, 1, 20), torch.randn(1, 1, 20), torch.rand(1, 1, 70, 41)
    mask = torch.rand(1, 20) > 0.3
    v = v.masked_fill(~mask[:, None, :, None], torch.nan)
    return Call(
        q,
        k,
        v,
        decay if kind == "decayed" else None,
        None if kind == "plain" else weight,
        state[..., :40],
        state[..., 40],
        key_mask=mask,
        function="elu",
        eps=1e-30,
    )


@cache
def expected(kind: str) -> tuple:
    """What came back to it, and its gradients."""
    call = a_call(kind)
    outputs = eager.forward(call)
    torch.manual_seed(1)
    grads = torch.randn_like(outputs.o), torch.randn_like(outputs.S), torch.randn_like(outputs.z)
    returned = Returned(*grads, *outputs[:2], *[None] * 4, False)
    return returned, eager.backward(call, returned).wanted(call)


def gradients(kind: str) -> None:
    """AssertionError where they are wrong."""
    call, (returned, right) = a_call(kind), expected(kind)
    for x, y in zip(backward_pass.backward(call, returned).wanted(call), right):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def caught(by: str):
    if by:
        return pytest.raises(InterpreterError, match=re.escape(by))
    return pytest.raises(AssertionError, match="not close")


@pytest.mark.parametrize(("how", "kind"), [("whole", "plain"), ("split", "decayed")])
def test_without_a_fault_gradients_are_right(how, kind, divided):
    divided(how)
    with honest_interpreter.order(3):
        gradients(kind)


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in OF.items() for fault in faults])
def test_a_fault_of_the_backward_pass_is_caught(kind, fault, planted, divided, monkeypatch):
    how, right, wrong, by = OF[kind][fault]
    divided(how)
    monkeypatch.setattr(backward_pass, "backward_kernels", planted(backward_kernels, right, wrong))
    with caught(by):
        gradients(kind)


@pytest.mark.parametrize("fault", PREFIX)
def test_a_fault_of_the_reverse_prefix_is_caught(fault, planted, divided, monkeypatch):
    how, right, wrong, by = PREFIX[fault]
    divided(how)
    monkeypatch.setattr(launch, "forward_kernels", planted(forward_kernels, right, wrong))
    with caught(by):
        gradients("decayed")


def steps() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 17), torch.randn(2, 2, 1, 17), torch.randn(2, 2, 1, 19)
    state = torch.rand(2, 2, 17, 19), torch.rand(2, 2, 17)
    call = Call(q, k, v, -torch.rand(2, 2, 1), None, *state, function="elu", eps=1e-30)
    right: Outputs = eager.step(call)
    found = one_token.step(call, True)
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[2:4], right[2:4])


def test_without_a_fault_a_step_is_right():
    steps()


@pytest.mark.parametrize("fault", STEP)
def test_a_fault_of_a_step_in_place_is_caught(fault, planted, monkeypatch):
    right, wrong, by = STEP[fault]
    monkeypatch.setattr(one_token, "one_token", planted(step_kernel, right, wrong).one_token)
    with caught(by):
        steps()
