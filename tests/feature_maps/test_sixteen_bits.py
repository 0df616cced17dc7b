"""Sixteen-bit queries and keys: their features keep float32's range and digits all the way into the kernels."""

import contextlib
import itertools

import pytest
import torch

from tarnn import feature_maps
from tarnn.feature_maps.base import PositionalMap
from tarnn.kernels.cpu import library
from tarnn.ops import linear_attention, step

SIXTEEN = [torch.bfloat16, torch.float16]
FUNCTIONS = [{"function": f} for f in ("relu", "exp", "abs", "sigmoid", "gelu", "cos")]


def differentiated(phi, x, dtype, causal=True):
    """The output and the gradients of q, k, v, all made of the same numbers in `dtype`."""
    q, k, v = (part.to(dtype).requires_grad_() for part in x)
    o = linear_attention(q, k, v, phi, causal=causal, normalize=phi.positive)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(x[0].dtype).to(dtype)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), grad)]


def sixteen_bit_inputs(dtype, d, std, centre=0.0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 67, n, generator=generator) for n in (d, d, 16))
    return [(std * q + centre).to(dtype), (std * k - centre / 2).to(dtype), v.to(dtype)]


def maps(d):
    """All that have names, but for those that need positions, and all functions of the generalized ones."""
    made = {name: feature_maps.make(name, head_dim=d, max_length=67) for name in feature_maps.names()}
    made = {name: phi for name, phi in made.items() if not isinstance(phi, PositionalMap)}
    for f in FUNCTIONS:
        made[f"generalized {f}"] = feature_maps.GeneralizedFeatures(**f)
        made[f"generalized random {f}"] = feature_maps.GeneralizedRandomFeatures(d, 64, seed=0, **f)
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("std", [1.0, 3.0])
@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_results_are_finite_wherever_the_dtype_holds_them(dtype, d, std, causal):
    x, wrong = sixteen_bit_inputs(dtype, d, std), []
    for name, phi in maps(d).items():
        exact = differentiated(phi, x, torch.float64, causal)
        for what, got, want in zip("oqkv", differentiated(phi, x, dtype, causal), exact):
            if want.abs().max() < torch.finfo(dtype).max / 2 and not got.isfinite().all():
                wrong.append((name, what))
    assert not wrong


INNER = {
    "positive": lambda d: feature_maps.PositiveRandomFeatures(d, 64, seed=0),
    "trigonometric": lambda d: feature_maps.TrigonometricRandomFeatures(d, 64, seed=0),
    "optimal": lambda d: feature_maps.OptimalRandomFeatures(d, 64, seed=0),
}


@pytest.mark.parametrize("backend", ["compiled", "plain"])
@pytest.mark.parametrize(
    ("inner", "centre"),
    [*itertools.product(("positive", "optimal"), (0.0, 10.0, 100.0)), ("trigonometric", 0.0), ("trigonometric", 1.0)],
)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_reparametrized_moves_without_rounding(dtype, inner, centre, backend):
    """At most twice the error of the same in float32 throughout, and one rounding of the result."""
    phi = feature_maps.Reparametrized(INNER[inner](64))
    normalize = phi.positive
    x = sixteen_bit_inputs(dtype, 64, 2.0 if normalize else 0.5, centre)
    phi = phi.fitted(*x[:2])
    with library.disabled() if backend == "plain" else contextlib.nullcontext():
        results = {}
        for dt in (dtype, torch.float32, torch.float64):
            q, k, v = (part.to(dt) for part in x)
            o, state = linear_attention(q, k, v, phi, causal=True, normalize=normalize, return_state=True)
            last, _ = step(q[:, :, :1], k[:, :, :1], v[:, :, :1], phi, state, normalize=normalize)
            results[dt] = torch.cat([o, last], dim=2)
    exact = results[torch.float64]
    size = exact.abs().max()
    theirs = (results[torch.float32].double() - exact).abs().max()
    assert (results[dtype].double() - exact).abs().max() <= 2 * theirs + torch.finfo(dtype).eps * size


@pytest.mark.parametrize("backend", ["compiled", "plain"])
def test_hedgehog_keeps_its_small_features_in_float16(backend):
    """Softmaxes of large numbers: in float16 their small entries are zeros, and so are denominators then."""
    torch.manual_seed(26)
    phi = feature_maps.Hedgehog(8, num_heads=2)
    x = [torch.rand(1, 2, 70, 8).mul(30).half() for _ in range(3)]
    found = {}
    with library.disabled() if backend == "plain" else contextlib.nullcontext():
        for dtype in (torch.float16, torch.float32):
            q, k, v = (part.to(dtype).requires_grad_() for part in x)
            o = linear_attention(q, k, v, phi, causal=True)
            found[dtype] = o, *torch.autograd.grad(o.float().sum(), [q, k])
    assert all(part.isfinite().all() for part in found[torch.float16])
    error = (found[torch.float16][0].float() - found[torch.float32][0]).abs().max()
    assert error < 2e-2  # one rounding of v and of o, values up to 30
