"""The operator on Triton's kernels: shapes as its fakes promise, opcheck, torch.compile, the second derivative, autocast."""

import pytest
import torch
from kernels.test_backends import VARIANTS, a_call, all_results, looks

from tarnn import Elu, linear_attention
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.triton import linear as triton
from tarnn.ops.linear.op import attend

pytestmark = pytest.mark.usefixtures("triton_kernels")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_results_look_as_the_others_do_and_all_is_written(number, divided):
    divided("split")
    torch.manual_seed(0)
    call = a_call(**VARIANTS[number], dtype=torch.float32 if number % 2 else torch.float16)
    assert triton.refusal(call) is None
    outputs, grads = all_results(triton, call)
    assert looks(outputs) == looks(call.new_outputs())
    assert looks(grads) == looks(all_results(eager, call)[1])
    assert not any(x is not None and x.isnan().any() for x in (*outputs, *grads))
    torch.testing.assert_close(outputs.o, eager.forward(call).o, rtol=5e-3, atol=5e-3)


def test_opcheck():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    call = a_call()._replace(q=q, k=k, v=v, S=None, z=None, M=None, log_decay=None, key_log_weight=None, key_mask=None)
    torch.library.opcheck(attend.forward_op, tuple(call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiles_without_a_graph_break():
    torch.compiler.reset()
    f = lambda q, k, v: linear_attention(q, k, v, Elu(), causal=True)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 9):
        inputs = [torch.randn(1, 2, t, 4, requires_grad=True) for _ in range(3)]
        found, expected = compiled(*inputs), f(*inputs)
        assert torch.equal(found, expected)
        for x, y in zip(torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
            assert torch.equal(x, y)


def test_the_second_derivative_is_that_of_the_definition():
    """It goes through plain PyTorch, from a first derivative by the kernels."""
    q, k, v = (torch.randn(1, 2, 7, 3).requires_grad_() for _ in range(3))

    def second(*inputs):
        (first,) = torch.autograd.grad(
            linear_attention(*inputs, causal=True).square().sum(), inputs[0], create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), inputs)

    exact = second(*(x.detach().double().requires_grad_() for x in (q, k, v)))
    for x, y in zip(second(q, k, v), exact):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-4)


def test_sums_stay_float32_under_autocast():
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    expected, state = linear_attention(*(x.bfloat16() for x in (q, k, v)), causal=True, return_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, found = linear_attention(q, k, v, causal=True, return_state=True)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected)
    assert torch.equal(found.S, state.S)


def test_nothing_later_changes_an_output_not_even_a_bit():
    call = a_call()
    cut = 5
    before = triton.forward(call).o[:, :, :cut]
    later = call._replace(**{name: getattr(call, name).clone() for name in ("q", "k", "v")})
    for x in (later.q, later.k, later.v):
        x[:, :, cut:] = 3.0
    assert torch.equal(triton.forward(later).o[:, :, :cut], before)


def test_a_batch_far_away_in_memory():
    """Row strides over 2³¹: addresses of rows are 64 bits wide. Memory that nobody touches is never there."""
    torch.use_deterministic_algorithms(False)
    far = torch.empty(2**31 + 5 * 16, dtype=torch.bfloat16).as_strided((2, 1, 5, 16), (2**31, 16, 16, 1))
    near = torch.randn(2, 1, 5, 16).bfloat16()
    far.copy_(near)
    q = torch.randn(2, 1, 5, 16).bfloat16()
    found = linear_attention(q, far, near, causal=True)
    assert torch.equal(found, linear_attention(q, near, near, causal=True))
