"""Kernels that have a closed form: Taylor, cosFormer, the generalized ones."""

import math

import pytest
import torch

from tarnn.feature_maps import CosFormer, GeneralizedFeatures, GeneralizedRandomFeatures, Taylor
from tarnn.ops import linear_attention


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_taylor_is_the_series():
    x, y = normal(9, 5), normal(9, 5, seed=2)
    for phi, scale in ((Taylor(), 5**-0.5), (Taylor(0.3), 0.3)):
        s = scale * (x * y).sum(-1)
        assert torch.allclose((phi(x) * phi(y)).sum(-1), 1 + s + s.square() / 2)


def gaussian_mean(f):
    """E f(u, v) over standard normal (u, v), by quadrature."""
    u = torch.linspace(-9, 9, 601, dtype=torch.float64)
    density = (-u.square() / 2).exp() * (u[1] - u[0]) / math.sqrt(2 * math.pi)
    return (density @ f(u[:, None], u[None]) @ density).item()


@pytest.mark.parametrize("function", [torch.relu, torch.abs, torch.sigmoid, torch.nn.functional.gelu, torch.exp])
def test_generalized_is_the_mean_over_projections(function):
    """x, y in the plane: ω·x and ω·y are sums of two normal numbers."""
    x, y = torch.tensor([0.6, 0.2], dtype=torch.float64), torch.tensor([0.3, -0.5], dtype=torch.float64)
    expected = gaussian_mean(lambda u, v: function(u * x[0] + v * x[1]) * function(u * y[0] + v * y[1]))
    phi = GeneralizedRandomFeatures(2, 200_000, function=function, epsilon=0.0, seed=0)
    assert (phi(x) @ phi(y)).item() == pytest.approx(expected, abs=0.01)
    named = GeneralizedRandomFeatures(2, 200_000, function=function.__name__, epsilon=0.0, seed=0)
    assert torch.allclose(named(x), phi(x))


def test_performer_relu_by_hand():
    """relu(x) + 10⁻³ on x itself; with projections, (relu(ω·x) + 10⁻³)/√m."""
    x = torch.tensor([-1.0, 0.0, 2.0])
    assert torch.allclose(GeneralizedFeatures()(x), torch.tensor([0.001, 0.001, 2.001]))
    phi = GeneralizedRandomFeatures(3, 4, seed=0)
    assert torch.allclose(phi(x), ((phi.omega @ x).relu() + 1e-3) / 2)


def test_a_weight_of_ones_own_multiplies():
    x, h = normal(3, 7, 5), lambda x: x.square().mean(-1)
    plain, weighted = (GeneralizedRandomFeatures(5, 6, h=f, seed=0) for f in (None, h))
    assert torch.allclose(weighted(x), plain(x) * h(x)[..., None])


def cosformer_definition(q, k, v, max_length, causal):
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    weights = (q.relu() @ k.relu().mT) * (distance * torch.pi / (2 * max_length)).cos()
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [True, False])
def test_cosformer_is_relu_times_a_cosine_of_the_distance(causal):
    q, k, v = normal(2, 2, 9, 5).abs(), normal(2, 2, 9, 5, seed=2).abs(), normal(2, 2, 9, 3, seed=3)
    phi = CosFormer(max_length=12)
    expected = cosformer_definition(q, k, v, 12, causal)
    assert torch.allclose(linear_attention(q, k, v, phi.at(torch.arange(9)), causal=causal), expected)
    rows = torch.stack([torch.arange(9), torch.arange(9) + 3])
    assert torch.allclose(linear_attention(q, k, v, phi.at(rows), causal=causal), expected)
