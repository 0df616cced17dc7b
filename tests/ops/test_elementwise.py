"""RMSNorm, with a gate too, and SwiGLU's product: against their formulas in float64, by compiled kernels and by PyTorch."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tarnn.kernels.cpu import elementwise as kernels, library
from tarnn.kernels.elementwise import Call
from tarnn.ops.elementwise import rms_norm, swiglu

SHAPES = [(0, 5), (1, 1), (3, 7), (2, 5, 16), (7, 31), (5, 4, 3, 48), (700, 130), (22, 2053)]


def formula_of_norm(x, weight, eps):
    return x * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def formula_of_swiglu(gate, up):
    return gate / (1 + (-gate).exp()) * up


def norm_of(x, weight):
    return rms_norm(x, weight, 1e-6)


def gated_norm(x, weight, gate):
    return rms_norm(x, weight, 1e-6, gate)


def formula_of_gated_norm(x, weight, gate):
    return formula_of_norm(x, weight, 1e-6) * functional.silu(gate)


def inverse_rms(x, weight, gate=None):
    return (x.square().mean(-1) + 1e-6).rsqrt()


CASES = [
    (norm_of, lambda x, w: formula_of_norm(x, w, 1e-6), lambda shape: (shape, shape[-1:])),
    (swiglu, formula_of_swiglu, lambda shape: (shape, shape)),
    (gated_norm, formula_of_gated_norm, lambda shape: (shape, shape[-1:], shape)),
]
NAMES = ["rms_norm", "swiglu", "gated_norm"]
FACTORS = [inverse_rms, lambda gate, up: torch.ones(()), inverse_rms]  # what else is a factor of a case's gradients


def with_gradients(f, inputs, grad):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = f(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("f", "formula", "shapes", "factor"), [(*case, x) for case, x in zip(CASES, FACTORS)], ids=NAMES
)
def test_values_and_gradients_are_those_of_the_formula(f, formula, shapes, factor, shape):
    """In float64 to the last digits; in others the error is at most twice that of PyTorch's own operations.

    Where it may be less than a rounding of the terms that a gradient is summed of: those are as large as their factors.
    """
    exact = [3 * torch.randn(s, dtype=torch.float64) for s in shapes(shape)]
    grad = torch.randn(shape, dtype=torch.float64)
    expected = with_gradients(formula, exact, grad)
    for x, y in zip(with_gradients(f, exact, grad), expected):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        small, of_y = [x.to(dtype) for x in exact], grad.to(dtype)
        expected = with_gradients(formula, [x.double() for x in small], of_y.double())
        with library.disabled():
            plain = with_gradients(f, small, of_y)
        factors = (*small, of_y, factor(*small))
        size = math.prod(max(x.abs().amax().item(), 1.0) for x in factors) if grad.numel() else 0.0
        for x, y, z in zip(with_gradients(f, small, of_y), expected, plain):
            tiny = torch.finfo(torch.float32).eps * size
            assert x.dtype == dtype
            assert (x.double() - y).norm() <= 2 * (z.double() - y).norm() + tiny


def test_a_weight_in_float32_is_not_rounded():
    x, weight, gate = torch.randn(4, 48).bfloat16(), torch.randn(48), torch.randn(4, 48).bfloat16()
    for given in ((x, weight), (x, weight, gate)):
        f, formula = (norm_of, CASES[0][1]) if len(given) == 2 else (gated_norm, formula_of_gated_norm)
        grad = torch.randn(4, 48).bfloat16()
        found, expected = with_gradients(f, given, grad), with_gradients(formula, [x.double() for x in given], grad)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a.double(), b, rtol=torch.finfo(a.dtype).eps, atol=1e-5)
        with library.disabled():
            torch.testing.assert_close(with_gradients(f, given, grad), found)


@pytest.mark.parametrize(("f", "formula", "shapes"), CASES, ids=NAMES)
def test_derivatives_of_both_orders(f, formula, shapes):
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes((3, 5))]
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.refusals
@pytest.mark.parametrize("width", [3, 5])
def test_a_weight_of_another_width_is_refused(width):
    """A kernel would read and write beyond the ends of what it was given: the process died later, in free()."""
    with pytest.raises(RuntimeError, match="normalized_shape"):
        rms_norm(torch.ones(2, 4), torch.ones(width), 1e-6)


def test_second_derivatives_of_a_single_row():
    x, weight = (torch.rand(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda x, weight: rms_norm(x, weight, 1e-6), (x, weight))


def test_silu_is_finite_wherever_its_gate_is():
    """e^x neither overflows nor is it lost, on either side; far out the gradient is 0 or that of the identity."""
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30], requires_grad=True)
    y = swiglu(gate, torch.ones(8))
    torch.testing.assert_close(y, functional.silu(gate), rtol=1e-6, atol=1e-35)
    (grad,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0, 0, 0.5, 0.5, 1, 1, 1]))


def test_the_same_bits_on_any_number_of_threads():
    x, weight, gate, grad = (torch.randn(*s) for s in ((3000, 96), (96,), (3000, 96), (3000, 96)))
    call = Call(x, weight, gate, "rms_norm", 1e-6)
    if kernels.refusal(call):
        pytest.skip(kernels.refusal(call))
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            outputs = kernels.forward(call)
            found.append((outputs.o, *kernels.backward(call, SimpleNamespace(grad_o=grad, scale=outputs.scale))))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_any_strides_and_dtypes():
    """Where the kernels don't take an input as it is, PyTorch's own operations do: the same numbers."""
    x, weight = torch.randn(4, 6, 10), torch.rand(10)
    torch.testing.assert_close(norm_of(x.mT.contiguous().mT, weight), norm_of(x, weight))
    torch.testing.assert_close(swiglu(x.mT.contiguous().mT, x), swiglu(x, x))
    assert norm_of(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    grads = with_gradients(norm_of, (x, weight), torch.ones(()).expand(4, 6, 10))
    torch.testing.assert_close(grads[1], with_gradients(norm_of, (x, weight), torch.ones(4, 6, 10))[1])


@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("f", "formula", "shapes"), CASES, ids=NAMES)
def test_torch_sees_through_them(f, formula, shapes):
    """torch.compile without a graph break, and torch.func."""
    x, *rest = (torch.randn(s, requires_grad=True) for s in shapes((3, 8)))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x, *rest), f(x, *rest))
    loss = lambda x: f(x, *rest).square().sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0])
