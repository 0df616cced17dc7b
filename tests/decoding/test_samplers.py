"""Samplers draw what transformers' own processors draw, and mean what their names say."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from tarnn.decoding.draws import Sampling, row_sampler
from tarnn.decoding.samplers import keep_top_k, keep_top_p, sampler

ROWS, VOCAB = 3, 257


def some_logits(seed=0):
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))


def transformers_draws(logits, seed, temperature, top_k, top_p, min_p=0.0):
    from transformers.generation import logits_process as theirs

    processors = theirs.LogitsProcessorList()
    if temperature != 1:
        processors.append(theirs.TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(theirs.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(theirs.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(theirs.MinPLogitsWarper(min_p))
    torch.manual_seed(seed)
    return torch.multinomial(processors(None, logits.clone()).softmax(-1), num_samples=1).squeeze(1)


CHOICES = itertools.product([0.7, 1.0, 1.9], [0, 1, 7, 1000], [0.3, 0.95, 1.0], [0.0, 0.02, 0.3, 1.0])


def test_draws_the_tokens_that_transformers_draws():
    for seed, choice in enumerate(CHOICES):
        temperature, top_k, top_p, min_p = choice
        logits, generator = some_logits(seed), torch.Generator().manual_seed(seed)
        ours = sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)
        before = logits.clone()
        assert torch.equal(ours(logits), transformers_draws(before, seed, *choice)), choice
        assert torch.equal(logits, before)  # what is given is left alone


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_a_repetition_penalty_is_that_of_transformers(penalty):
    """Row by row, and of what was drawn as of what was given."""
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    had, way = torch.tensor([[5, 17, 2, 5]]).expand(ROWS, -1), Sampling(temperature=0, repetition_penalty=penalty)
    draw = row_sampler(way, VOCAB, seed=0, prompt=had[0].tolist(), num_rows=ROWS)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for seed in range(20):
        logits = some_logits(seed % 2)
        token = draw(logits)
        assert torch.equal(token, theirs(had, logits.clone()).argmax(-1))
        had = torch.cat([had, token[:, None]], 1)


@given(p=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p, seed):
    probabilities = some_logits(seed).double().softmax(-1)
    kept = ~keep_top_p(p)(some_logits(seed)).isinf()
    for row, keep in zip(probabilities, kept, strict=True):
        inside, outside = row[keep], row[~keep]
        assert outside.numel() == 0 or outside.max() <= inside.min()
        assert inside.sum() > p - 1e-4
        assert keep.sum() == 1 or inside.sum() - inside.min() < p + 1e-4


@pytest.mark.parametrize("p", [1e-3, 1e-9, 1e-30])
def test_the_smallest_top_p_still_keeps_the_most_likely_token(p):
    logits = torch.cat([some_logits(), torch.zeros(1, VOCAB)])
    warped = keep_top_p(p)(logits)
    assert (~warped.isinf()).sum(-1).tolist() == [1] * (ROWS + 1)
    assert torch.equal(warped.max(-1).values, logits.max(-1).values)


@given(k=st.integers(1, 300), seed=st.integers(0, 99))
def test_top_k_keeps_the_k_highest(k, seed):
    logits = some_logits(seed)
    warped = keep_top_k(k)(logits)
    assert (~warped.isinf()).sum(-1).tolist() == [min(k, VOCAB)] * ROWS
    assert torch.equal(warped.max(-1).values, logits.max(-1).values)


def test_temperature_zero_is_the_most_likely_token():
    logits = some_logits()
    assert torch.equal(sampler(temperature=0, top_k=5, top_p=0.5)(logits), logits.argmax(-1))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"top_p": float("nan")}, "top-p"),
        ({"temperature": 0, "top_p": 2.0}, "top-p"),
        ({"min_p": -0.1}, "min-p"),
        ({"min_p": 1.5}, "min-p"),
        ({"min_p": float("nan")}, "min-p"),
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        sampler(**wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_refused(temperature, bad):
    logits = some_logits()
    logits[1, 5] = bad
    if temperature == 0 and bad == float("inf"):
        assert sampler(temperature=0)(logits)[1] == 5
        return
    with pytest.raises(ValueError, match="NaN"):
        sampler(temperature=temperature)(logits)
