"""The honest interpreter: what a GPU would show, or worse, would not, is an error; numbers are those of tensor cores."""

import pytest
import torch
import triton
import triton.language as tl
from support import honest_interpreter
from triton.runtime.errors import InterpreterError


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
    with pytest.raises(InterpreterError, match=r"store outside of every tensor, 6 lanes.*test_interpreter"):
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


@triton.jit
def sums(x, o, total, count, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.store(o + i, tl.cumsum(a, 0))
    tl.store(total, tl.sum(a, 0))
    for n in range(B):
        tl.store(count + n, n.to(tl.int64) * 2**20)


def test_sums_of_bfloat16_and_what_counts_a_loop():
    x = torch.randn(16).bfloat16()
    o, total, count = torch.zeros_like(x), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    sums[(1,)](x, o, total, count, 16)
    assert torch.equal(o, x.float().cumsum(0).bfloat16())
    assert torch.equal(total, x.float().sum(0, keepdim=True).bfloat16())
    assert torch.equal(count, torch.arange(16) * 2**20)
