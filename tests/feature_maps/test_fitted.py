"""Maps that take parameters from the data: spreads are right, identities exact, each call or sequence by itself."""

import pytest
import torch

from tarnn.feature_maps import (
    DataAwareRandomFeatures,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    Reparametrized,
    SderfFeatures,
)
from tarnn.feature_maps.optimal import optimal_a
from tarnn.feature_maps.statistics import spread_of
from tarnn.ops import linear_attention

D = 5
MAKE = {
    "optimal": lambda: OptimalRandomFeatures(D, 12, seed=0, fit="call"),
    "data-aware": lambda: DataAwareRandomFeatures(D, 12, seed=0, fit="call"),
    "sderf": lambda: SderfFeatures(D, 12, seed=0, fit="call"),
    "centred, balanced": lambda: Reparametrized(PositiveRandomFeatures(D, 12, seed=0), fit="call"),
    "saderf": lambda: Reparametrized(OptimalRandomFeatures(D, 12, seed=0, fit="call"), centre=False, fit="call"),
    "centred sderf": lambda: Reparametrized(SderfFeatures(D, 12, seed=0, fit="call"), balance=False, fit="call"),
    "all of it": lambda: Reparametrized(OptimalRandomFeatures(D, 12, seed=0, fit="call"), fit="call"),
}


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(t=11, heads=4, kv_heads=2):
    """Queries and keys off centre, unalike in their channels, rows and heads."""
    channels = torch.linspace(0.4, 1.6, D).double()
    rows = 1 + 0.3 * torch.arange(3)[:, None, None, None]
    q = (normal(3, heads, t, D) * channels + normal(heads, 1, D, seed=4)) * rows
    return q, normal(3, kv_heads, t, D, seed=2) / channels - 0.3, normal(3, kv_heads, t, 3, seed=3)


def test_spread_is_mean_and_covariance():
    q, _, _ = data()
    spread = spread_of(q, 2, full=True)
    assert spread.mean.shape == (3, 2, 1, D)
    for b in range(3):
        for g in range(2):
            x = q[b, 2 * g : 2 * g + 2].flatten(0, 1)  # (22, D): both query heads of the group
            assert torch.allclose(spread.mean[b, g, 0], x.mean(0))
            assert torch.allclose(spread.variance[b, g, 0], x.var(0, correction=0))
            assert torch.allclose(spread.covariance[b, g, 0], x.T.cov(correction=0))
            assert torch.allclose(spread.square[b, g, 0], x.square().mean(0))
            assert spread.number[b, g, 0] == 22


def test_spread_keeps_its_digits_far_from_zero():
    """Two passes: squares around 10⁴ would leave nothing of a variance of 10⁻² in float32."""
    x = normal(1, 1, 500, D) * 0.1 + 1e4
    assert torch.allclose(
        spread_of(x.float(), 1).variance.double(), spread_of(x.float().double(), 1).variance, rtol=1e-3
    )


def test_what_is_masked_does_not_count_even_nan():
    q, _, _ = data()
    mask = torch.arange(11)[None] < torch.tensor([[11], [4], [0]])
    q = q.masked_fill(~mask[:, None, :, None], torch.nan)
    spread = spread_of(q, 2, mask=mask, full=True)
    for found, expected in zip(spread, spread_of(q[1:2, :, :4], 2, full=True), strict=True):
        assert torch.allclose(found[1:2], expected)
    assert all((x[2] == 0).all() for x in spread)  # nothing to count: zeros


def test_merged_spreads_are_that_of_all():
    q, _, _ = data()
    parts, whole = ([spread_of(q[:, :, a:b], 2, full=True) for a, b in ((0, 3), (3, 11))], spread_of(q, 2, full=True))
    for found, expected in zip(parts[0].merged(parts[1]), whole, strict=True):
        assert torch.allclose(found, expected)
    flat = q.transpose(0, 1).unflatten(0, (2, 2)).flatten(1, 3)  # (2, 3·2·11, D)
    total = whole.over_batch()
    assert torch.allclose(total.mean[:, 0], flat.mean(1))
    assert torch.allclose(total.variance[:, 0], flat.var(1, correction=0))
    assert torch.allclose(total.covariance[1, 0], flat[1].T.cov(correction=0))


def test_optimal_a_minimises_the_second_moment():
    """log E (φ(x)·φ(y))² = d log(1 − 4A) − d/2 log(1 − 8A) + 2 (1 − 4A)/(1 − 8A) |x + y|² + const."""
    for spread in (0.0, 1e-6, 0.01, 0.3, 2.0, 8.0):
        a = torch.linspace(-3, 0.12, 312_001, dtype=torch.float64)
        moment = (1 - 4 * a).log() - 0.5 * (1 - 8 * a).log() + 2 * (1 - 4 * a) / (1 - 8 * a) * spread
        found = optimal_a(torch.tensor(spread, dtype=torch.float64))
        assert found.item() == pytest.approx(a[moment.argmin()].item(), abs=2e-5)
    exact = optimal_a(torch.tensor([1e-7, 3.0], dtype=torch.float64))
    assert torch.allclose(optimal_a(torch.tensor([1e-7, 3.0])).double(), exact, rtol=1e-6)  # no digits lost


def test_optimal_a_is_that_of_all_pairs():
    """Its λ, from means and variances alone, is the mean of |q_i + k_j|² over pairs, by d."""
    q, k, _ = data()
    phi = OptimalRandomFeatures(D, 12, scale=0.7, seed=0)
    fitted = phi.fitted(q, k)
    assert fitted.A.shape == (3, 2, 1, 1)
    pairs = (q.unflatten(1, (2, 2))[:, :, :, :, None] + k[:, :, None, None]).square().sum(-1).mean((2, 3, 4))
    assert torch.allclose(fitted.A[..., 0, 0], optimal_a(0.7 * pairs / D))


@pytest.mark.parametrize("grouped", [False, True])
def test_the_identities_are_exact(grouped):
    """scale·q·k = scale·q'·k' + (a weight a query) + (a weight a key), whatever the centres and stretches."""
    q, k, _ = data(heads=4 if grouped else 2)
    inner = PositiveRandomFeatures(D, 12, scale=0.7, seed=0)
    for phi in (Reparametrized(inner).fitted(q, k), filled(Reparametrized(inner, num_heads=2))):
        (moved_q, log_q), (moved_k, log_k) = phi.moved_queries(q), phi.moved_keys(k)
        each = (1, (2, -1))
        products = 0.7 * (moved_q.unflatten(*each) @ moved_k[:, :, None].mT)
        products = products + log_q.unflatten(*each)[..., None] + log_k[:, :, None, None]
        assert torch.allclose(products, 0.7 * (q.unflatten(*each) @ k[:, :, None].mT), atol=1e-9)
        assert not torch.allclose(moved_k, k, atol=0.1)


def filled(phi):
    for name, x in phi.named_buffers(recurse=False):
        x.copy_(normal(*x.shape, seed=9).abs() if name == "stretch" else normal(*x.shape, seed=8))
    return phi


def test_centred_and_balanced_means_what_it_says():
    q, k, _ = data()
    phi = Reparametrized(PositiveRandomFeatures(D, 12, seed=0)).fitted(q, k)
    moved = [spread_of(x[0], 2) for x in (phi.moved_queries(q), phi.moved_keys(k))]
    assert all(x.mean.abs().max() < 1e-9 for x in moved)
    assert torch.allclose(moved[0].variance, moved[1].variance, rtol=1e-4)


@pytest.mark.parametrize("name", MAKE)
def test_rows_and_heads_are_fitted_one_by_one(name):
    q, k, v = data()
    phi = MAKE[name]().double()
    whole = linear_attention(q, k, v, phi.fitted(q, k), causal=False)
    for b in range(3):
        for g in range(2):
            mine = q[b : b + 1, 2 * g : 2 * g + 2], k[b : b + 1, g : g + 1]
            alone = linear_attention(*mine, v[b : b + 1, g : g + 1], phi.fitted(*mine), causal=False)
            assert torch.allclose(whole[b : b + 1, 2 * g : 2 * g + 2], alone)


@pytest.mark.parametrize("name", MAKE)
def test_padded_is_cut(name):
    q, k, v = data()
    mask = torch.arange(11)[None].expand(3, -1) < 7
    q[:, :, 7:], k[:, :, 7:] = 100.0, torch.nan
    phi = MAKE[name]().double()
    padded = linear_attention(q, k, v, phi.fitted(q, k, query_mask=mask, key_mask=mask), causal=False, key_mask=mask)
    q, k, v = (x[:, :, :7] for x in (q, k, v))
    assert torch.allclose(padded[:, :, :7], linear_attention(q, k, v, phi.fitted(q, k), causal=False))


@pytest.mark.parametrize("name", [n for n, make in MAKE.items() if not make().full_spread])
def test_packed_is_the_loop(name):
    q, k, v = (x[:1] for x in data())
    cuts = [0, 4, 4, 5, 11]
    cu_seqlens = torch.tensor(cuts, dtype=torch.int32)
    phi = MAKE[name]().double()
    fitted = phi.fitted(q, k, cu_seqlens=cu_seqlens)
    packed = linear_attention(q, k, v, fitted, causal=False, cu_seqlens=cu_seqlens)
    for a, b in zip(cuts, cuts[1:]):
        mine = [x[:, :, a:b] for x in (q, k, v)]
        alone = linear_attention(*mine, phi.fitted(*mine[:2]), causal=False)
        assert torch.allclose(packed[:, :, a:b], alone)


@pytest.mark.parametrize("name", MAKE)
def test_fresh_they_are_neutral(name):
    """Before they are calibrated: FAVOR+."""
    q, k, v = data()
    plain = linear_attention(q, k, v, PositiveRandomFeatures(D, 12, seed=0), causal=True)
    assert torch.allclose(linear_attention(q, k, v, MAKE[name](), causal=True), plain)
