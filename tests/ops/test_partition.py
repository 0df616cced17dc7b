"""Softmax over many classes: the partition function, its error, probabilities, and the sums as a value."""

import pytest
import torch

from tarnn.feature_maps import (
    Elu,
    HyperbolicRandomFeatures,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    Reparametrized,
    TrigonometricRandomFeatures,
)
from tarnn.feature_maps.statistics import spread_of
from tarnn.ops import ClassSums, partition, random_feature_softmax, sum_classes

pytestmark = pytest.mark.one_path
D, N = 8, 1000


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")


@pytest.fixture
def problem(device):
    """Queries, classes off centre, and how often each class counts, as logarithms."""
    classes = 0.4 * normal(N, D, seed=2) + 0.3
    return (x.to(device) for x in (0.5 * normal(7, D) + 0.2, classes, normal(N, seed=3)))


def centred(make, q, k):
    phi = Reparametrized(make)
    phi.calibrate(*(spread_of(x[None, None], 1).over_batch() for x in (q, k)))
    return phi


MAKE = {
    "positive": lambda m, seed, q, k: PositiveRandomFeatures(D, m, seed=seed),
    "positive, iid": lambda m, seed, q, k: PositiveRandomFeatures(D, m, seed=seed, directions="iid"),
    "hyperbolic, iid": lambda m, seed, q, k: HyperbolicRandomFeatures(D, m, seed=seed, directions="iid"),
    "centred": lambda m, seed, q, k: centred(PositiveRandomFeatures(D, m, seed=seed), q, k),
    "optimal": lambda m, seed, q, k: OptimalRandomFeatures(D, m, A=-0.05, seed=seed),
}


@pytest.mark.parametrize("name", MAKE)
def test_the_partition_function_and_its_error(name, problem):
    """Over 200 draws: the mean of Z is Z; errors are as large as they say (orthogonal ones smaller)."""
    q, k, w = problem
    exact = (D**-0.5 * q @ k.T + w).logsumexp(-1)
    found, errors = [], []
    for seed in range(200):
        phi = MAKE[name](64, seed, q, k)
        result = random_feature_softmax(q, k[:5], phi, sum_classes(k, phi, log_weight=w))
        found.append((result.log_partition - exact).exp())
        errors.append(result.standard_error)
    ratios, told = torch.stack(found), torch.stack(errors).square().mean(0).sqrt()  # (200, 7)
    spread = ratios.std(0)
    assert ((ratios.mean(0) - 1).abs() < 4 * spread / 200**0.5).all()
    small = told < 0.2  # beyond, heavy tails: it tells too little
    assert small.sum() >= 3
    assert ((spread / told)[small] < 1.3).all()
    if "iid" in name:
        assert (spread / told)[small].mean() == pytest.approx(1, abs=0.15)


def test_centring_halves_the_error(problem):
    q, k, _ = problem
    errors = []
    for name in ("positive", "centred"):
        phi = MAKE[name](256, 0, q, k)
        errors.append(random_feature_softmax(q, k[:1], phi, sum_classes(k, phi)).standard_error.mean())
    assert errors[1] < 0.5 * errors[0]


def test_probabilities_of_given_classes(problem):
    """With many features: softmax's, for the same classes for all or for some of each query's own."""
    q, k, w = problem
    phi = PositiveRandomFeatures(D, 8000, seed=0)
    sums, exact = sum_classes(k, phi, log_weight=w), (D**-0.5 * q @ k.T + w).log_softmax(-1)
    result = random_feature_softmax(q, k[:5], phi, sums, log_weight=w[:5])
    assert torch.allclose(result.log_prob, exact[:, :5], atol=0.05)
    own = torch.arange(7, device=q.device)[:, None] * 3 + torch.arange(2, device=q.device)  # (7, 2)
    result = random_feature_softmax(q, k[own], phi, sums, log_weight=w[own])
    assert torch.allclose(result.log_prob, exact.gather(1, own), atol=0.05)
    assert random_feature_softmax(q, k[:0], phi, sums).log_prob.shape == (7, 0)
    assert random_feature_softmax(q[0], k[:5], phi, sums).log_prob.shape == (5,)


def test_sums_in_chunks_and_in_parts_are_the_whole(problem, monkeypatch):
    q, k, w = problem
    phi = MAKE["positive"](32, 0, q, k)
    whole = sum_classes(k, phi, log_weight=w)
    monkeypatch.setattr(partition, "CHUNK", 700)
    chunked = sum_classes(k, phi, log_weight=w)
    parts = sum_classes(k[:10], phi, log_weight=w[:10]) + sum_classes(k[10:], phi, log_weight=w[10:])
    for other in (chunked, parts):
        assert torch.allclose(whole.total * whole.log_scale.exp(), other.total * other.log_scale.exp())
    none = sum_classes(k[:0], phi)
    assert torch.allclose((none + whole).total, whole.total)
    assert (random_feature_softmax(q, k[:0], phi, none).log_partition == -torch.inf).all()


def test_a_weight_of_minus_infinity_leaves_a_class_out(problem):
    q, k, _ = problem
    phi, out = MAKE["positive"](32, 0, q, k), torch.arange(N, device=k.device) % 3 == 0
    sums = sum_classes(k, phi, log_weight=torch.where(out, -torch.inf, 0.0))
    assert torch.allclose(sums.total * sums.log_scale.exp(), _value(sum_classes(k[~out], phi)))
    nothing = sum_classes(k, phi, log_weight=torch.full_like(k[:, 0], -torch.inf)) + sum_classes(k[:0], phi)
    assert nothing.total.isfinite().all()


def _value(sums: ClassSums):
    return sums.total * sums.log_scale.exp()


def test_large_norms_and_low_precision(problem):
    """Logits in the hundreds, in bf16: no overflow, sums in float32."""
    q, k, _ = problem
    phi = MAKE["positive"](32, 0, q, k)
    sums = sum_classes((40 * k).bfloat16(), phi)
    result = random_feature_softmax((3 * q).bfloat16(), (40 * k[:5]).bfloat16(), phi, sums)
    assert sums.total.dtype == result.log_prob.dtype == torch.float32
    assert result.log_partition.isfinite().all()


def test_autocast_rounds_nothing(problem):
    """Neither sums nor logits go through its 16-bit products."""
    q, k, w = (x.float() for x in problem)
    phi = PositiveRandomFeatures(D, 256, seed=0).to(q.device)
    exact = random_feature_softmax(q, k[:5], phi, sum_classes(k, phi, log_weight=w))
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        sums = sum_classes(k, phi, log_weight=w)
        found = random_feature_softmax(q, k[:5], phi, sums)
    assert sums.total.dtype == torch.float32
    for one, other in zip(found, exact):
        assert torch.equal(one, other)


def test_gradients_reach_queries_classes_and_weights(problem):
    """Those of −log p, as finite differences have them; only the estimate of Z depends on the draw."""
    q, k, w = problem
    phi = MAKE["hyperbolic, iid"](10, 0, q, k)

    def loss(q, k, w):
        sums = sum_classes(k, phi, log_weight=w)
        return -random_feature_softmax(q, k[:3], phi, sums, log_weight=w[:3]).log_prob

    inputs = [x[:6].clone().requires_grad_() for x in (q, k, w)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.refusals
@pytest.mark.parametrize(
    ("phi", "message"),
    [
        (Elu(), "random features of softmax's kernel, such as PositiveRandomFeatures; got Elu"),
        (TrigonometricRandomFeatures(D, 6), "may estimate a negative sum"),
    ],
)
def test_maps_that_do_not_fit(phi, message):
    with pytest.raises(ValueError, match=message):
        sum_classes(torch.ones(3, D), phi)
