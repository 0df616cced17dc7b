"""Faults that a GPU would show, or worse, would not: planted, and caught."""

import pytest
import torch
import triton
import triton.language as tl
from support import honest_interpreter
from triton.runtime.errors import InterpreterError

from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call, Returned
from tarnn.kernels.triton import backward_pass, forward_kernels, launch

# --- the interpreter's own


@triton.jit
def add_one(x, y, n, B: tl.constexpr, OTHER: tl.constexpr, MASK_STORE: tl.constexpr, SHIFT: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < n, other=0.0) if OTHER else tl.load(x + i, mask=i < n)
    if MASK_STORE:
        tl.store(y + SHIFT * i, a + 1, mask=i < n)
    else:
        tl.store(y + SHIFT * i, a + 1)


@triton.jit
def two_masks(x, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, 1.0, mask=(i >= 0) & (i < n))


@triton.jit
def neighbours(x, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    before = tl.load(x + tl.maximum(i - 1, 0))
    tl.store(x + i, before)


@triton.jit
def product(x, y, o, M: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    a = tl.load(x + i * K + j)
    b = tl.load(y + i * K + j)
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    tl.store(o + rows * M + columns, tl.dot(a, tl.trans(b), input_precision=PRECISION))


@triton.jit
def far_apart(x, y, stride):
    tl.store(y, tl.load(x + (tl.program_id(0) + 65_536) * stride, mask=stride < 0, other=0.0))


def add(x, *, n=10, b=8, other=True, mask_store=True, shift=1, y=None):
    y = torch.zeros(n) if y is None else y
    add_one[(triton.cdiv(n, b),)](x, y, n, b, other, mask_store, shift)
    return y


def test_what_is_right_passes():
    x = torch.randn(10)
    for seed in (None, 0, 1):
        with honest_interpreter.order(seed):
            assert torch.equal(add(x), x + 1)


def test_a_store_out_of_bounds():
    with pytest.raises(InterpreterError, match=r"store outside of every tensor, 6 lanes.*test_faults"):
        add(torch.randn(10), mask_store=False)


def test_a_store_out_of_bounds_behind_a_mask_of_two():
    """Triton's interpreter makes an integer of `a & b`; lanes were looked up by it, as by an index."""
    with pytest.raises(InterpreterError, match=r"store outside of every tensor, 1 lanes"):
        two_masks[(1,)](torch.zeros(10), 11, 16)
    two_masks[(1,)](torch.zeros(10), 10, 16)


def test_a_lane_masked_off_is_no_number():
    assert add(torch.randn(10), other=False, mask_store=False, y=torch.zeros(16))[10:].isnan().all()


def test_lanes_and_programs_that_write_one_element():
    with pytest.raises(InterpreterError, match="two lanes of one store"):
        add(torch.randn(10), shift=0)
    with pytest.raises(InterpreterError, match="race"):
        neighbours[(4,)](torch.randn(32), 8)


@pytest.mark.parametrize(
    ("dtype", "precision", "least", "most"),
    [
        (torch.float32, "ieee", 0, 3e-7),
        (torch.float32, "tf32", 1e-5, 2e-3),
        (torch.float32, "tf32x3", 0, 1e-6),
        (torch.float32, "bf16x3", 1e-7, 1e-4),
        (torch.bfloat16, "ieee", 0, 3e-7),
    ],
)
def test_products_have_the_digits_of_tensor_cores(dtype, precision, least, most):
    torch.manual_seed(0)
    x, y, o = torch.randn(16, 64).to(dtype), torch.randn(16, 64).to(dtype), torch.empty(16, 16)
    product[(1,)](x, y, o, 16, 64, precision)
    exact = x.double() @ y.double().T
    assert least <= ((o - exact).norm() / exact.norm()).item() < most


def test_a_product_too_small_for_a_tensor_core():
    with pytest.raises(InterpreterError, match="16 or more"):
        product[(1,)](torch.randn(16, 8), torch.randn(16, 8), torch.empty(16, 16), 16, 8, "ieee")


def test_addresses_that_overflow():
    with pytest.raises(InterpreterError, match="int32 arithmetic overflows"):
        far_apart[(1,)](torch.zeros(1), torch.zeros(1), 2**17)


# --- planted in the kernels

FAULTS = {
    "outputs are stored beyond the end": (
        "store_rows(o, row, h, t0, rows, inside, ce, spec.E, out)",
        "store_rows(o, row, h, t0, rows, rows < spec.C, ce, spec.E, out)",
    ),
    "a key behind the end has a feature: φ(0) = 1": (
        "pair_products(phi_q, phi_k, factors",
        "pair_products(phi_q, phi_k + tl.where(live[:, None], 0.0, 1.0), factors",
    ),
    "a masked key's value is read": (
        "load_rows(v, row, g, t0, rows, live, ce, spec.E), spec)\n            pair",
        "load_rows(v, row, g, t0, rows, inside, ce, spec.E), spec)\n            pair",
    ),
    "a query sees what comes after it": (
        "products = pair_products(phi_q, phi_k, factors, spec) * pair",
        "products = product(lowered(phi_q, spec), tl.trans(lowered(phi_k, spec)), spec)",
    ),
    "the state of an item contains its own sum": (
        "tl.store(sums + place * F * E + i, total, mask=live)",
        "tl.store(sums + place * F * E + i, total + own, mask=live)",
    ),
    "every block of values writes z": (
        "    if block == 0:\n        tl.store(z + place * spec.F + cf, sums",
        "    if block >= 0:\n        tl.store(z + place * spec.F + cf, sums",
    ),
    "an item reads its neighbour's sum": (
        "own = tl.load(sums + place * F * E + i",
        "own = tl.load(sums + (place + 1) * F * E + i",
    ),
}


def a_call() -> Call:
    """Two chunks, two blocks of values."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 70) for _ in range(2))
    mask = torch.rand(1, 20) > 0.3
    v = torch.randn(1, 1, 20, 40).masked_fill(~mask[:, None, :, None], torch.nan)
    return Call(q, k, v, key_mask=mask, function="elu", eps=1e-30)


def is_right() -> bool:
    call = a_call()
    expected, found = eager.forward(call), launch.forward(call, True)
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(found[:4], expected))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, planted, divided, poisoned_memory, monkeypatch):
    divided("split")
    monkeypatch.setattr(launch, "forward_kernels", planted(forward_kernels, *FAULTS[fault]))
    try:
        right = is_right()
    except InterpreterError:
        return
    assert not right


def test_without_a_fault_it_is_right(divided, poisoned_memory):
    divided("split")
    assert is_right()


def test_a_gradient_is_not_stored_beyond_the_end(divided, poisoned_memory):
    """Of tensors with room behind them: what lies there stays."""
    divided("split")
    call = a_call()
    outputs = launch.forward(call, True)
    room = torch.full((1, 1, 30, 70), 7.0)
    made = Call.new_gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "new_gradients", lambda *x: made(*x)._replace(q=room[:, :, :20]))
        backward_pass.backward(call, Returned(outputs.o, None, None, *outputs[:2], *[None] * 4, False))
    assert (room[:, :, 20:] == 7.0).all()
    assert not room[:, :, :20].isnan().any()
