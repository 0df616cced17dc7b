"""One suite over all maps: a new one is tested by adding a row."""

import pytest
import torch
from support.attention_cases import MAPS as ELEMENTWISE

from tarnn import feature_maps
from tarnn.feature_maps.draws import RandomFeatureMap
from tarnn.feature_maps.statistics import FittedMap, spread_of
from tarnn.kernels.features import NAMES, features, features_backward
from tarnn.numerics import wide
from tarnn.ops import linear_attention, step
from tarnn.ops.linear import definition as linear_definition

D = 6
TWO_SIDED = (feature_maps.Reparametrized, feature_maps.QueryClusters)  # queries and keys have features of their own
SEED = {"head_dim": D, "seed": 0}
MAPS = {
    **ELEMENTWISE,
    "polynomial": feature_maps.Polynomial2(),
    "polynomial with offset": feature_maps.Polynomial2(offset=0.7),
    "dpfp": feature_maps.Dpfp(),
    "dpfp nu=3": feature_maps.Dpfp(nu=3),
    "hedgehog": feature_maps.Hedgehog(D),
    "hedgehog with heads": feature_maps.Hedgehog(D, num_heads=2, num_features=10),
    "clusters": feature_maps.QueryClusters(num_features=11, **SEED),
    "clusters with heads": feature_maps.QueryClusters(num_features=11, num_heads=2, **SEED),
    "positive": feature_maps.PositiveRandomFeatures(num_features=11, **SEED),
    "positive, scale": feature_maps.PositiveRandomFeatures(num_features=3, scale=0.7, **SEED),
    "hyperbolic": feature_maps.HyperbolicRandomFeatures(num_features=10, **SEED),
    "regularized": feature_maps.RegularizedRandomFeatures(num_features=9, **SEED),
    "trigonometric": feature_maps.TrigonometricRandomFeatures(num_features=10, **SEED),
    "gaussian": feature_maps.GaussianRandomFeatures(num_features=10, sigma=1.5, **SEED),
    "optimal, A given": feature_maps.OptimalRandomFeatures(num_features=11, A=-0.2, **SEED),
    "optimal": feature_maps.OptimalRandomFeatures(num_features=11, **SEED),
    "optimal with heads": feature_maps.OptimalRandomFeatures(num_features=11, num_heads=2, **SEED),
    "sderf": feature_maps.SderfFeatures(num_features=11, **SEED),
    "data-aware": feature_maps.DataAwareRandomFeatures(num_features=11, **SEED),
    "data-aware with heads": feature_maps.DataAwareRandomFeatures(num_features=11, num_heads=2, **SEED),
    "sderf with heads": feature_maps.SderfFeatures(num_features=11, num_heads=2, **SEED),
    "reparametrized": feature_maps.Reparametrized(feature_maps.PositiveRandomFeatures(num_features=11, **SEED)),
    "reparametrized with heads": feature_maps.Reparametrized(
        feature_maps.OptimalRandomFeatures(num_features=11, num_heads=2, **SEED), num_heads=2
    ),
    "reparametrized sderf": feature_maps.Reparametrized(feature_maps.SderfFeatures(num_features=11, **SEED)),
    "reparametrized, signed": feature_maps.Reparametrized(
        feature_maps.TrigonometricRandomFeatures(num_features=10, **SEED), balance=False
    ),
    "generalized": feature_maps.GeneralizedFeatures(),
    "generalized gelu": feature_maps.GeneralizedFeatures("gelu", epsilon=0.0),
    "generalized, user's": feature_maps.GeneralizedFeatures(torch.cosh, positive=True),
    "generalized random relu": feature_maps.GeneralizedRandomFeatures(num_features=11, **SEED),
    "generalized random exp": feature_maps.GeneralizedRandomFeatures(num_features=11, function="exp", **SEED),
    "generalized random cos": feature_maps.GeneralizedRandomFeatures(num_features=11, function="cos", **SEED),
    "generalized random, user's": feature_maps.GeneralizedRandomFeatures(
        num_features=11,
        function=torch.nn.functional.softplus,
        positive=True,
        h=lambda x: 1 / (1 + x.square().sum(-1)),
        **SEED,
    ),
    "taylor": feature_maps.Taylor(),
}


@pytest.fixture(params=MAPS)
def phi(request):
    torch.manual_seed(0)
    made = MAPS[request.param]
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    if isinstance(made, FittedMap) and made.adapts:  # parameters that are not neutral
        for_q, for_k = 1.3 * inputs() + 0.3, 0.8 * inputs() - 0.2
        spreads = (spread_of(x, made.num_heads, full=made.full_spread).over_batch() for x in (for_q, for_k))
        made.calibrate(*spreads)
    return made


SIDES = ("queries", "keys")


def applied(phi, x, side="queries"):
    """φ(x) with its scale."""
    value, scale = getattr(phi, side)(x)
    return value if scale is None else value * scale.exp()[..., None]


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 7, D, generator=generator, dtype=torch.float64).to(dtype)


def test_width_is_as_declared(phi):
    for side in SIDES:
        assert applied(phi, inputs(), side).shape == (3, 4, 7, phi.num_features(D))


def test_one_token_at_a_time(phi):
    x = inputs()
    for side in SIDES:
        assert torch.allclose(applied(phi, x, side)[:, :, 2:3], applied(phi, x[:, :, 2:3], side), rtol=1e-12)


def test_declared_positive_is_positive(phi):
    x, y = applied(phi, 10 * inputs()), applied(phi, 10 * inputs().flip(2), "keys")
    products = torch.einsum("bhtf, bhsf -> bhts", x, y)
    assert (products.min() >= 0) == phi.positive


@pytest.mark.parametrize("side", SIDES)
def test_scaled_is_the_map_with_its_scale_apart(phi, side):
    x = inputs().requires_grad_()
    value, scale = getattr(phi, side)(x)
    assert (scale is not None) == phi.log_scaled
    if scale is not None:
        assert scale.shape == x.shape[:-1]
        assert not scale.requires_grad
        assert value.max() <= 1
    if not isinstance(phi, TWO_SIDED):  # whose queries and keys differ
        assert torch.allclose(applied(phi, x, side), phi(x), rtol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_gradients(phi, side):
    """The scale is a constant under autograd, and the gradient through the features is the whole."""
    assert torch.autograd.gradcheck(lambda x: applied(phi, x, side), inputs().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keeps_the_dtype_and_about_its_precision(phi, dtype):
    """An exponential makes an error of eps in an exponent of size u one of u·eps in its value. Features that a kernel
    takes, with their scale apart, may be wider than x."""
    x = inputs(dtype)
    if not isinstance(phi, TWO_SIDED):  # which has none for one x
        assert phi(x).dtype == dtype
    for side in SIDES:
        value, scale = getattr(phi, side)(x)
        assert value.dtype in (dtype, wide(dtype))
        if list(phi.parameters()):
            continue
        exact, exact_scale = getattr(phi, side)(x.double())
        value, size = value.double(), 1.0
        if scale is not None:
            # in 16 bits a scale of 100 is off by 0.4
            assert scale.dtype == torch.float32 or not isinstance(phi.inner, RandomFeatureMap)
            value, size = value * (scale.double() - exact_scale).exp()[..., None], 1 + exact_scale.abs().max()
        eps = 8 * torch.finfo(dtype).eps * size
        assert torch.allclose(value, exact, rtol=eps, atol=eps)


def test_attention_with_it_is_the_definition_and_steps_agree(phi):
    q, k, v = inputs(), inputs().flip(1)[:, :2], inputs()[:, :2, :, :5]
    o, state = linear_attention(q, k, v, phi, causal=True, normalize=phi.positive, return_state=True)
    phi_q, phi_k = applied(phi, q), applied(phi, k, "keys")
    expected = linear_definition.quadratic(phi_q, phi_k, v, causal=True, normalize=phi.positive)
    assert torch.allclose(o, expected, rtol=1e-9, atol=1e-12)
    past = None
    for i in range(q.shape[2]):
        one = (x[:, :, i : i + 1] for x in (q, k, v))
        last, past = step(*one, phi, past, normalize=phi.positive)
    assert torch.allclose(last, o[:, :, -1:], rtol=1e-9, atol=1e-12)
    assert torch.allclose(past.S, state.S)
    assert (state.M is not None) == phi.log_scaled


def test_kernels_compute_the_same_map(phi):
    if not phi.kernel:
        assert phi.kernel not in NAMES
        return
    x = inputs().requires_grad_()
    value, scale = features(phi.kernel, x)
    expected, expected_scale = phi.scaled(x)
    assert torch.equal(value, expected)
    assert scale is None or torch.equal(scale, expected_scale)
    grad = torch.randn_like(value)
    got = features_backward(phi.kernel, x.detach(), value.detach(), grad)
    assert torch.allclose(got, torch.autograd.grad(value, x, grad)[0])


def test_polynomial_is_the_kernel_exactly():
    x, y = torch.randn(9, D, dtype=torch.float64), torch.randn(9, D, dtype=torch.float64)
    for offset in (0.0, 0.7):
        phi = feature_maps.Polynomial2(offset)
        assert torch.allclose((phi(x) * phi(y)).sum(-1), ((x * y).sum(-1) + offset) ** 2)


def test_dpfp_by_hand():
    """r = [1, 0, 0, 2]; r ⊙ roll(r, 1) = [1·2, 0, 0, 0]."""
    assert feature_maps.Dpfp()(torch.tensor([1.0, -2.0])).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert (feature_maps.Dpfp(3)(torch.randn(99, D)) >= 0).all()


def test_a_query_at_a_centre_attends_as_softmax_does():
    """With a sharp choice of centres, and exactly."""
    torch.manual_seed(0)
    q, k = 2 * torch.randn(2, 2, 5, D), 5 * torch.randn(2, 2, 9, D)
    phi = feature_maps.QueryClusters(D, 10, num_heads=2, sharpness=1e4)
    phi.cluster(q.transpose(0, 1).flatten(1, 2))
    (phi_q, _), (phi_k, scale) = phi.queries(q), phi.keys(k)
    weights = (phi_q @ phi_k.mT).log() + scale[:, :, None]
    exact = D**-0.5 * q @ k.mT
    torch.testing.assert_close(weights.log_softmax(-1).exp(), exact.softmax(-1), rtol=1e-4, atol=1e-5)


def test_hedgehog_starts_as_two_softmaxes_and_gives_each_key_head_its_queries():
    x = inputs()
    fresh = feature_maps.Hedgehog(D, num_heads=2)
    assert torch.allclose(fresh(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1))
    torch.nn.init.normal_(fresh.weight)
    alone = feature_maps.Hedgehog(D)
    alone.weight.data = fresh.weight.data[1:]
    assert torch.allclose(fresh(x)[:, 2:], alone(x[:, 2:]))  # 4 query heads, 2 maps: heads 2 and 3 have the second
