"""Random features that are made within the op: what is kept, gradients of ω, sizes that no float32 holds, errors."""

import pytest
import torch

from tarnn import feature_maps
from tarnn.feature_maps.base import FeatureMap, Projected, Projection
from tarnn.ops import linear_attention, step
from tarnn.ops.linear import definition as linear_definition

D, M = 16, 40
MAPS = {
    "positive": feature_maps.PositiveRandomFeatures(D, M, seed=0),
    "hyperbolic": feature_maps.HyperbolicRandomFeatures(D, M, seed=0),
    "optimal": feature_maps.OptimalRandomFeatures(D, M, num_heads=2, A=-0.1, seed=0),
    "random relu": feature_maps.GeneralizedRandomFeatures(D, M, seed=0),
    "reparametrized": feature_maps.Reparametrized(feature_maps.PositiveRandomFeatures(D, M, seed=0)),
}


def tensors(t=70, dtype=torch.float64, spread=0.7):
    generator = torch.Generator().manual_seed(0)
    rand = lambda h, d: torch.randn(2, h, t, d, generator=generator, dtype=torch.float64) * spread  # noqa: E731
    return [x.to(dtype) for x in (rand(4, D), rand(2, D), rand(2, 5))]


def defined(phi, q, k, v, **options):
    """By stored features and the quadratic form."""
    (fq, _), (fk, weight) = phi.queries(q), phi.keys(k)
    return linear_definition.quadratic(fq, fk, v, key_log_weight=weight, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_features_are_never_kept(name, causal):
    """For backward stay q, k, v, o, a few numbers a token, and ω. (Of a map that moves them, q and k as moved.)"""
    q, k, v = (x.requires_grad_() for x in tensors(t=1000, dtype=torch.float32))
    kept = {}

    def keep(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = linear_attention(q, k, v, MAPS[name], causal=causal)
    copies = 3 if name == "reparametrized" else 1
    tokens = q.shape[0] * q.shape[1] * q.shape[2]
    assert sum(kept.values()) <= copies * (q.numel() + k.numel()) + v.numel() + o.numel() + 4 * tokens + 4 * M * D
    assert sum(kept.values()) < M * tokens  # which the features of the queries alone would be


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "optimal", "random relu"])
def test_gradients_of_a_learned_omega(name, packed, causal, chunks):
    """ω made a parameter gets its gradient through the kernels, chunk by chunk and stretch by stretch."""
    phi = MAPS[name]
    learned = torch.nn.Parameter(phi.omega.double())
    q, k, v = tensors()
    cuts = [0, 3, 3, 41, 70] if packed else [0, 70]
    if packed:
        q, k, v = (x[:1] for x in (q, k, v))
    omega, phi._buffers["omega"] = phi._buffers["omega"], learned
    try:
        cu_seqlens = torch.tensor(cuts, dtype=torch.int32) if packed else None
        o = linear_attention(q, k, v, phi, causal=causal, cu_seqlens=cu_seqlens)
        spans = [slice(i, j) for i, j in zip(cuts, cuts[1:])]
        expected = [defined(phi, *(x[:, :, at] for x in (q, k, v)), causal=causal) for at in spans]
        expected = torch.cat(expected, dim=2)
        grad = torch.randn_like(o)
        got, right = (torch.autograd.grad(x, learned, grad)[0] for x in (o, expected))
    finally:
        phi._buffers["omega"] = omega
    assert torch.allclose(got, right, rtol=1e-8, atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_second_derivatives_where_omega_is_not_learned(name, packed, causal):
    """Of q, k and v, with ω the buffer that it is by default: its gradient is not there to be differentiated."""
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32) if packed else None
    given = [x[: 1 if packed else 2].clone().requires_grad_() for x in tensors(t=5)]

    def attend(q, k, v):
        return linear_attention(q, k, v, MAPS[name], causal=causal, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradgradcheck(attend, given, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "optimal"])
def test_norms_whose_features_no_float32_holds(name, causal):
    """Exponents of hundreds, up and down, in float32 within the rounding of an exponent; gradients too. (They are far
    from zero and near each other: features of one that are nothing beside those of the other are below eps together.)"""
    phi, (q, k, v) = MAPS[name], tensors(spread=0.1)
    far = 60 * torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = [x.requires_grad_() for x in (q + far, k + far, v)]
    narrow = [x.detach().float().requires_grad_() for x in exact]
    exponents = phi.exponents(exact[1])
    u = exponents.x @ exponents.omega.double().mT
    assert u.max() > 89  # e^u overflows
    assert exponents.offset.min() < -104  # e^offset underflows, and with it every feature
    o, right = (linear_attention(*xs, phi, causal=causal) for xs in (narrow, exact))
    assert torch.allclose(o.double(), right, rtol=1e-2, atol=1e-2)
    grads = torch.autograd.grad(o.sum(), narrow)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_the_whole_in_every_precision(name, dtype):
    """Steps without gradients, which the kernel does, and with, which plain PyTorch does."""
    phi, (q, k, v) = MAPS[name], tensors(t=20, dtype=dtype)
    whole = linear_attention(q, k, v, phi, causal=True)
    for no_grad in (True, False):
        state, outputs = None, []
        for i in range(q.shape[2]):
            one = [x[:, :, i : i + 1] for x in (q, k, v)]
            if not no_grad:
                one = [x.requires_grad_() for x in one]
            o, state = step(*one, phi, state)
            outputs.append(o)
        eps = 4 * torch.finfo(dtype).eps
        assert torch.allclose(torch.cat(outputs, dim=2), whole, rtol=eps, atol=eps)
        assert state.S.dtype == torch.float32


def test_gradients_of_a_buffer_flow_through_steps_as_through_the_whole():
    """`torch.func.functional_call` puts tensors with gradients in the places of buffers: here of ω."""
    model = torch.nn.Sequential(MAPS["positive"])
    q, k, v = tensors(t=3)
    model.forward = lambda how: how(q, k, v, model[0])
    omega = model[0].omega.double().requires_grad_()

    def in_steps(q, k, v, phi):
        state, outputs = None, []
        for i in range(q.shape[2]):
            o, state = step(*(x[:, :, i : i + 1] for x in (q, k, v)), phi, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2)

    def whole(q, k, v, phi):
        return linear_attention(q, k, v, phi, causal=True)

    outputs = (torch.func.functional_call(model, {"0.omega": omega}, (how,)) for how in (in_steps, whole))
    got, right = (torch.autograd.grad(o.square().sum(), omega)[0] for o in outputs)
    assert torch.allclose(got, right, rtol=1e-8, atol=1e-10)


def test_parameters_of_other_heads_or_rows_are_refused():
    q, k, v = tensors()
    three = feature_maps.OptimalRandomFeatures(D, M, num_heads=3)
    with pytest.raises(ValueError, match="3 heads"):
        linear_attention(q, k, v, three, causal=True)
    fitted = feature_maps.OptimalRandomFeatures(D, M, num_heads=2, fit="call").fitted(q, k)
    assert linear_attention(q, k, v, fitted, causal=False).shape == (2, 4, 70, 5)
    three_rows = (torch.cat([x, x[:1]]) for x in (q, k, v))
    with pytest.raises(ValueError, match="2 rows"):
        linear_attention(*three_rows, fitted, causal=False)


def test_another_width_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="head_dim = 16"):
        linear_attention(q[..., :8], k[..., :8], v, MAPS["positive"], causal=True)


@pytest.mark.parametrize("shape", [(M, 4), (M, 64), (M,)])
def test_an_omega_of_another_width_is_refused(shape):
    """Kernels would read beyond its end; and a buffer's width is anybody's to change."""
    phi = feature_maps.PositiveRandomFeatures(D, M, seed=0)
    phi.omega = torch.randn(shape)
    q, k, v = tensors(1, torch.float32)
    for call in (linear_attention, step):
        with pytest.raises((ValueError, IndexError)):
            call(q, k, v, phi, **{"causal": True} if call is linear_attention else {})


@pytest.mark.parametrize(
    ("omega", "bias"), [((1, 1, M, 4), None), ((1, 1, M, D), (1, 1, 5)), ((1, 1, M, D), (1, M)), ((1, M, D), None)]
)
def test_a_projection_of_ones_own_that_does_not_fit_is_refused(omega, bias):
    class Own(FeatureMap):
        positive = True

        def __init__(self, omega, bias=None):
            super().__init__()
            self.omega, self.bias = omega, bias

        def num_features(self, head_dim):
            return M

        def projected(self, q, k):
            return Projected(Projection("relu", self.omega, self.bias), q, k)

    q, k, v = tensors(dtype=torch.float32)
    with pytest.raises((ValueError, IndexError)):
        linear_attention(q, k, v, Own(torch.randn(omega), None if bias is None else torch.randn(bias)), causal=True)
    fits = Own(torch.randn(1, 1, M, D), torch.randn(1, 1, M))
    assert linear_attention(q, k, v, fits, causal=True).shape == (2, 4, 70, 5)
