"""Distributions over 256 values: they add up, they are what they say, and what is drawn follows them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tarnn.models import Categorical, LogisticMixture

BOTH = [LogisticMixture(3), Categorical()]
VALUES = torch.arange(256)


def parameters(likelihood, *shape, spread=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, likelihood.num_parameters, generator=generator, dtype=dtype)


@pytest.mark.parametrize("likelihood", BOTH, ids=lambda x: x.name)
@settings(max_examples=25, deadline=None)
@given(spread=st.sampled_from([0.0, 0.3, 1.0, 3.0, 20.0, 1000.0]), seed=st.integers(0, 10**6))
def test_256_probabilities_add_up_to_one(likelihood, spread, seed):
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        total = likelihood.log_probs(parameters(likelihood, 5, spread=spread, seed=seed, dtype=dtype)).exp().sum(-1)
        torch.testing.assert_close(total, torch.ones(5, dtype=dtype), rtol=0, atol=close)


@pytest.mark.parametrize("likelihood", BOTH, ids=lambda x: x.name)
def test_one_value_is_its_place_among_all(likelihood):
    theta = parameters(likelihood, 3, 256)
    alone, values = likelihood.log_prob(theta, VALUES.expand(3, 256)), likelihood.log_probs(theta)
    torch.testing.assert_close(alone, values.diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(likelihood.log_prob(theta, VALUES.byte().expand(3, 256)), alone)


def test_the_mixture_is_a_difference_of_sigmoids():
    """Its definition, on [−1, 1] with bins of 2/255, where that can be computed as it is written."""
    mixture = LogisticMixture(3)
    theta = parameters(mixture, 7)
    logits, means, log_scales = (x[:, None] for x in theta.chunk(3, dim=-1))
    x = (VALUES.double() / 127.5 - 1)[None, :, None]
    above = torch.sigmoid((x + 1 / 255 - means) / log_scales.exp())
    below = torch.sigmoid((x - 1 / 255 - means) / log_scales.exp())
    above[:, 255], below[:, 0] = 1.0, 0.0
    expected = (logits.softmax(-1) * (above - below)).sum(-1)
    torch.testing.assert_close(mixture.log_probs(theta).exp(), expected, rtol=1e-10, atol=1e-15)


def test_the_mixture_does_not_go_over_to_a_density():
    """Far out and for wide ones a float32 difference of sigmoids is 0; the logarithm still is that of float64."""
    mixture = LogisticMixture(1)
    for log_scale in (-6.0, 0.0, 6.0):
        theta = torch.tensor([[0.0, -0.9, log_scale]])
        found = mixture.log_probs(theta)[0]
        torch.testing.assert_close(found.double(), mixture.log_probs(theta.double())[0], rtol=1e-5, atol=1e-5)
        assert log_scale != -6 or found[200] < -500


@pytest.mark.parametrize("likelihood", BOTH, ids=lambda x: x.name)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_gradients_are_finite_for_every_value(likelihood, spread):
    theta = parameters(likelihood, 4, 256, spread=spread, dtype=torch.float32).requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_prob(theta, VALUES.expand(4, 256)).sum(), theta)
    assert gradient.isfinite().all()
    assert spread == 1e4 or (gradient != 0).any(-1).all()
    small = parameters(likelihood, 2, 3).requires_grad_()
    value = torch.tensor([[0, 100, 255], [255, 0, 7]])
    torch.autograd.gradcheck(lambda x: likelihood.log_prob(x, value), (small,))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("likelihood", BOTH, ids=lambda x: x.name)
def test_what_is_drawn_follows_the_likelihood(likelihood, temperature):
    """Frequencies of 20,000 draws within five standard deviations, the open bins 0 and 255 well filled."""
    draws, theta = 20_000, parameters(likelihood, 1, seed=4, dtype=torch.float32)[0]
    if isinstance(likelihood, LogisticMixture):
        theta = torch.tensor([1.5, 0.0, -1.0, -0.95, 0.2, 1.0, -3.0, -3.5, -2.0])  # π, μ, log s of three
    drawn = likelihood.sample(theta.expand(draws, -1), torch.Generator().manual_seed(0), temperature)
    sharper = theta.double()
    if isinstance(likelihood, LogisticMixture):
        logits, means, log_scales = sharper.chunk(3)
        cooler = log_scales + torch.tensor(temperature).log()
        sharper = torch.cat([logits / temperature, means, cooler])
    else:
        sharper = sharper / temperature
    p = likelihood.log_probs(sharper).exp()
    if isinstance(likelihood, LogisticMixture) and temperature == 1:
        assert min(p[0], p[255]) > 0.03
    found = torch.bincount(drawn, minlength=256) / draws
    assert ((found - p).abs() < 5 * (p / draws).sqrt() + 1e-4).all()
    assert (found - p).abs().sum() < 0.12


def test_no_temperature_is_no_chance():
    theta = parameters(LogisticMixture(3), 50, dtype=torch.float32)
    logits, means, _ = theta.chunk(3, dim=-1)
    expected = ((means.gather(-1, logits.argmax(-1, keepdim=True)) + 1) * 127.5).round().clamp(0, 255)
    assert torch.equal(LogisticMixture(3).sample(theta, temperature=0), expected.long().squeeze(-1))
    theta = parameters(Categorical(), 50)
    assert torch.equal(Categorical().sample(theta, temperature=0), theta.argmax(-1))
