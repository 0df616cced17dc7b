"""Layers of transformers that are a kind of their own in the fused step give their own logits, in whatever pieces."""

from functools import cache

import pytest
import torch
from support.linear_families import TOKENS, linear_model

from tarnn.decoding.fused import FusedStep, refusal
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore"),
]


@cache
def model_of(**changes):
    model = linear_model("Mamba-2", **changes)
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1:
                x.add_(0.3 * torch.randn_like(x))
    return model


def step_of(weights="float32", **changes):
    return FusedStep(model_of(**changes), weights)


SHAPES = {
    "two groups": {},
    "odd": {"num_heads": 6, "head_dim": 20, "state_size": 17, "n_groups": 3, "hidden_size": 60, "use_bias": True},
    "narrow filters": {"conv_kernel": 2, "use_conv_bias": False},
    "wide": {"num_heads": 2, "head_dim": 96, "state_size": 70, "n_groups": 1, "hidden_size": 96, "conv_kernel": 9},
}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_its_own_logits(shape):
    step = step_of(**SHAPES[shape])
    logits, state = step.prefill(TOKENS[:, :30], step.new_state(2), every=True)
    more = [logits]
    for token in TOKENS[:, 30:40].T:
        out, state = step(token, state)
        more.append(out[:, None])
    expected = model_of(**SHAPES[shape])(TOKENS[:, :40]).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.cat(more, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", FORMATS)
def test_to_the_last_bit_in_any_pieces(weights):
    """A prompt of 70 tokens at once, in pieces, behind padding and beside another row, or token by token."""
    step = step_of(weights, **SHAPES["odd"])
    one, state = [], step.new_state(1)
    for token in TOKENS[0]:
        out, state = step(token[None], state)
        one.append(out)
    expected = torch.cat(one)
    pieces, after = [], step.new_state(1)
    for part in TOKENS[:1].split([1, 33, 2, 34], 1):
        out, after = step.prefill(part, after, every=True)
        pieces.append(out[0])
    assert torch.equal(torch.cat(pieces), expected)
    mask = torch.ones_like(TOKENS)
    mask[1, :20] = mask[0, 64:] = 0
    both, padded = step.prefill(TOKENS, step.new_state(2), mask, every=True)
    assert torch.equal(both[0, :64], expected[:64])
    _, short = step.prefill(TOKENS[1:, 20:], step.new_state(1))
    for found, y in zip(padded.layers, short.layers, strict=True):
        assert torch.equal(found.S[1], y.S[0])
        assert torch.equal(found.tokens[1], y.tokens[0])
        assert torch.equal(state.layers[0].S, after.layers[0].S)


def test_what_it_does_not_take_it_names():
    assert "hidden_act must be 'silu'" in refusal(model_of(hidden_act="gelu"))


@torch.no_grad()
def test_time_steps_are_limited_token_by_token_as_in_a_prompt():
    step = step_of(time_step_limit=(0.0, 0.7))
    logits, _ = step.prefill(TOKENS[:, :40], step.new_state(2), every=True)
    expected = model_of(time_step_limit=(0.0, 0.7))(TOKENS[:, :40]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    unlimited = step_of()
    assert not torch.allclose(unlimited.prefill(TOKENS[:, :40], unlimited.new_state(2), every=True)[0], expected)
