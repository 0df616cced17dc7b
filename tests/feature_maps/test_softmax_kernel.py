"""Random features of softmax's kernel: unbiased, of the variance that the papers say, and safe at any norm."""

import pytest
import torch

from tarnn.feature_maps import (
    DataAwareRandomFeatures,
    GaussianRandomFeatures,
    HyperbolicRandomFeatures,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    RegularizedRandomFeatures,
    Reparametrized,
    SderfFeatures,
    TrigonometricRandomFeatures,
)
from tarnn.feature_maps.statistics import FittedMap, spread_of
from tarnn.numerics import default_eps
from tarnn.ops import linear_attention
from tarnn.ops.linear import definition as linear_definition
from tarnn.ops.softmax import definition as softmax_definition

UNBIASED = {
    "positive": PositiveRandomFeatures,
    "positive, iid": lambda d, m, **o: PositiveRandomFeatures(d, m, directions="iid", **o),
    "hyperbolic": HyperbolicRandomFeatures,
    "trigonometric": TrigonometricRandomFeatures,
    "optimal": lambda d, m, **o: OptimalRandomFeatures(d, m, A=-0.03, **o),
    "data-aware": lambda d, m, **o: calibrated(DataAwareRandomFeatures(d, m, least=0.7, **o)),
    "sderf": lambda d, m, **o: calibrated(SderfFeatures(d, m, **o)),
    "centred and balanced": lambda d, m, **o: calibrated(Reparametrized(PositiveRandomFeatures(d, m, **o))),
    "centred, optimal": lambda d, m, **o: calibrated(Reparametrized(OptimalRandomFeatures(d, m, **o))),
}


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calibrated(phi):
    """Fitted to some queries and keys that lie off centre and unalike in their channels."""
    inner = getattr(phi, "feature_map", phi)
    channels = torch.linspace(0.5, 1.5, inner.head_dim).double()
    q, k = normal(1, 1, 50, inner.head_dim), normal(1, 1, 50, inner.head_dim, seed=2)
    spreads = (
        spread_of(x, 1, full=phi.full_spread).over_batch()
        for x in (0.3 * q * channels + 0.1, 0.3 * k / channels - 0.05)
    )
    phi.calibrate(*spreads)
    return phi


def pair(d):
    """x and y of norm 0.8 and 0.9, with x·y = 0.45."""
    x, y = normal(d), normal(d, seed=2)
    x = 0.8 * x / x.norm()
    across = y - (y @ x) * x / (x @ x)
    return x, 0.9 * (0.625 * x / x.norm() + (1 - 0.625**2) ** 0.5 * across / across.norm())


def estimates(make, d, draws, blocks=1, scale=1.0):
    """Estimates of exp(scale·x·y), one a draw of blocks·d directions."""
    x, y = pair(d)
    phi = make(d, 1, scale=scale, seed=0) if make not in PAIRED else make(d, 2, scale=scale, seed=0)
    random = getattr(phi, "feature_map", phi)
    random.num_draws = draws * blocks * d  # one large draw: its blocks are independent
    random.register_buffer("omega", random.omega_of(0, 0))
    phi.double()
    (fx, sx), (fy, sy) = phi.queries(x[None, None]), phi.keys(y[None, None])
    products = (fx * fy * (sx + sy).exp()[..., None]).flatten() * random.num_draws
    if len(products) == 2 * random.num_draws:  # sines and cosines, or e^u and e^(−u), of one direction
        products = products[: random.num_draws] + products[random.num_draws :]
    return products.unflatten(0, (draws, -1)).mean(-1)


PAIRED = (HyperbolicRandomFeatures, TrigonometricRandomFeatures)


@pytest.mark.thorough
@pytest.mark.parametrize("d", [4, 16, 64])
@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(name, d):
    """The mean over independent draws of d directions is exp(x·y), within 3 standard errors."""
    x, y = pair(d)
    found = estimates(UNBIASED[name], d, draws=max(400, 32_000 // d))
    error = found.std() / len(found) ** 0.5
    assert error < 0.08
    assert abs(found.mean() - (x @ y).exp()) < 3 * error


def test_the_gaussian_kernel():
    x, y = pair(16)
    phi = GaussianRandomFeatures(16, 100_000, sigma=1.3, seed=0).double()
    assert (phi(x) @ phi(y)).item() == pytest.approx((-(x - y).square().sum() / (2 * 1.3**2)).exp().item(), abs=0.01)


def variances(x, y):
    """Lemma 2 of arXiv 2009.14794 for one draw: trigonometric, positive, hyperbolic."""
    kernel, plus, minus = (x @ y).exp(), (x + y).square().sum(), (x - y).square().sum()
    positive = plus.exp() * kernel**2 * (1 - (-plus).exp())
    return {
        TrigonometricRandomFeatures: 0.5 * plus.exp() * kernel**-2 * (1 - (-minus).exp()) ** 2,
        PositiveRandomFeatures: positive,
        HyperbolicRandomFeatures: 0.5 * (1 - (-plus).exp()) * positive,
    }


@pytest.mark.parametrize("d", [4, 16])
@pytest.mark.parametrize("make", [PositiveRandomFeatures, *PAIRED])
def test_the_variance_of_independent_draws_is_lemma_2(make, d):
    found = estimates(lambda *a, **o: make(*_even(make, a), directions="iid", **o), d, draws=200_000 // d)
    expected = variances(*pair(d))[make].item() / d
    spread = (found - found.mean()).square()
    assert abs(spread.mean() - expected) < 4 * spread.std() / len(found) ** 0.5
    assert spread.mean().item() == pytest.approx(expected, rel=0.2)


def _even(make, sizes):
    return (sizes[0], 2) if make in PAIRED else sizes


@pytest.mark.parametrize("d", [4, 16])
@pytest.mark.parametrize("make", [PositiveRandomFeatures, *PAIRED])
def test_orthogonal_directions_have_less(make, d):
    """By theorem 2 at least 2(m − 1)/(m(d + 2)) (SM − e^(−(|x|² + |y|²)/2))² less, for positive features."""
    x, y = pair(d)
    found = estimates(make, d, draws=200_000 // d)
    variance, iid = found.var(), variances(x, y)[make] / d
    assert variance < 0.97 * iid
    if make is PositiveRandomFeatures:
        least = 2 * (d - 1) / (d * (d + 2)) * ((x @ y).exp() - (-(x @ x + y @ y) / 2).exp()) ** 2
        assert variance < 1.03 * (iid - least)


def test_regularized_is_a_little_below():
    """1 − 2/d^(1/3) ≤ SMREG/SM ≤ 1 (theorem 1), and less variance than with fresh norms."""
    x, y = pair(64)
    found = estimates(RegularizedRandomFeatures, 64, draws=500)
    ratio = (found.mean() / (x @ y).exp()).item()
    assert 0.97 < ratio < 1
    assert found.var() < estimates(PositiveRandomFeatures, 64, draws=500).var()


def test_less_variance_where_it_is_claimed():
    """On large, off-centre queries and keys: optimal beats plain, centred and balanced beats both."""
    channels = torch.linspace(0.3, 2, 16).double()
    q = 0.5 * (normal(1, 1, 60, 16) * channels + 0.5)
    k, v = 0.5 * (normal(1, 1, 60, 16, seed=2) / channels + 0.5), normal(1, 1, 60, 5, seed=3)
    expected = softmax_definition.softmax(q, k, v, causal=False)

    def error(make):
        """Mean square over 20 draws, by the square of the output."""
        total = 0.0
        for seed in range(20):
            phi = make(seed).double()
            phi = phi.fitted(q, k) if isinstance(phi, FittedMap) else phi
            total += (linear_attention(q, k, v, phi, causal=False) - expected).square().mean().item()
        return total / 20 / expected.square().mean().item()

    plain = error(lambda seed: PositiveRandomFeatures(16, seed=seed))  # 0.072
    optimal = error(lambda seed: OptimalRandomFeatures(16, seed=seed))  # 0.040
    sderf = error(lambda seed: SderfFeatures(16, seed=seed))  # 0.030
    centred = error(lambda seed: Reparametrized(PositiveRandomFeatures(16, seed=seed), balance=False))  # 0.048
    balanced = error(lambda seed: Reparametrized(PositiveRandomFeatures(16, seed=seed), centre=False))  # 0.026
    saderf = error(lambda seed: Reparametrized(OptimalRandomFeatures(16, seed=seed), centre=False))  # 0.014
    both = error(lambda seed: Reparametrized(PositiveRandomFeatures(16, seed=seed)))  # 0.009
    all_three = error(lambda seed: Reparametrized(OptimalRandomFeatures(16, seed=seed)))  # 0.005
    assert optimal < 0.7 * plain
    assert sderf < 0.9 * optimal
    assert centred < 0.8 * plain
    assert balanced < 0.5 * plain
    assert saderf < 0.7 * min(balanced, optimal)
    assert both < 0.5 * min(centred, balanced)
    assert all_three < 0.7 * both


def test_data_aware_features_vary_least_over_gaussian_queries_and_keys():
    """Below SDERF's and FAVOR+'s, and below those of a wider and of a narrower proposal; the closed form of theorem 3.2."""
    d, number = 3, 100_000
    channels = torch.tensor([0.1, 0.3, 0.4], dtype=torch.float64)  # Λ's square roots, with scale 1
    q, k = (channels * normal(1, 1, number, d, seed=s) for s in (1, 2))
    spreads = [spread_of(x, 1, full=True).over_batch() for x in (q, k)]

    def maps(kind, factor=1.0):
        phi = kind(d, number, scale=1.0, directions="iid", seed=0).double()
        if isinstance(phi, FittedMap):
            phi.calibrate(*spreads)
            phi.a.copy_((1 - factor * (1 - 4 * phi.a)) / 4)
        return phi

    def variance(phi):
        """Mean over pairs, one ω each."""
        omega, a, U = phi.omega, getattr(phi, "a", torch.zeros(1, 1, d))[0], getattr(phi, "U", torch.eye(d)[None])[0]
        stretch = 1 - 4 * a.double()
        one = 0.5 * stretch.log().sum() + (2 * a * omega.square()).sum(-1)
        both = (omega * stretch.sqrt() * ((q + k)[0, 0] @ U.double())).sum(-1)
        products = (one + both - 0.5 * (q.square() + k.square())[0, 0].sum(-1)).exp()
        return (products.square() - (2 * q * k).sum(-1)[0, 0].exp()).mean()

    aware = maps(DataAwareRandomFeatures)
    found, expected = (1 - 4 * aware.a).flatten().sort().values, (1 + 2 * channels**2) / (1 - 2 * channels**2)
    assert torch.allclose(found, expected, rtol=0.02)
    least = variance(aware)
    for other in (maps(SderfFeatures), maps(PositiveRandomFeatures)):
        assert least < 0.97 * variance(other)
    for factor in (0.7, 1.5):
        assert least < 0.97 * variance(maps(DataAwareRandomFeatures, factor))


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", [n for n in UNBIASED if n != "trigonometric"])
def test_no_norm_overflows(name, size):
    """In float32 as in float64, though the features themselves are e^(±5000) where vectors are 100 long."""
    phi = UNBIASED[name](8, 24, seed=0)
    q, k, v = (x.float() for x in (size * normal(1, 2, 20, 8), size * normal(1, 2, 20, 8, seed=2), normal(1, 2, 20, 3)))
    o = linear_attention(q, k, v, phi, causal=True)
    (fq, _), (fk, w) = phi.queries(q.double()), phi.keys(k.double())
    eps = default_eps(torch.float32)  # sums below it fade to zero, instead of becoming noise
    expected = linear_definition.quadratic(fq, fk, v.double(), causal=True, key_log_weight=w, eps=eps)
    assert o.isfinite().all()
    assert (o.abs().amax(-1) > 0).float().mean() > (0.95 if size <= 10 else 0.2)
    tolerance = 2e-5 * (1 + 0.2 * size**2)  # exponents of this size, in float32
    assert torch.allclose(o.double(), expected, rtol=tolerance, atol=tolerance)


def test_in_autocast_the_exponents_stay_in_float32():
    """ω·x in bf16 would be off by 2^(−9) of itself: at |ω·x| = 50, a tenth of the feature."""
    x = 20 * normal(30, 16).float()
    phi = PositiveRandomFeatures(16, 64, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        found, scale = phi.scaled(x)
    expected, exact_scale = phi.scaled(x)
    assert torch.equal(found, expected)
    assert torch.equal(scale, exact_scale)
    q, k, v = (normal(1, 1, 30, 16, seed=s).float() for s in (1, 2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_attention(q, k, v, phi, causal=True).dtype == torch.bfloat16
