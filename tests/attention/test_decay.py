"""Decays: the closed forms they start from, and that all are ≤ 0 and as wide as they say."""

import math

import pytest
import torch

from tarnn.attention import ChannelDecay, HeadDecay, TokenDecay
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForMaskedLM


def test_retention_slopes():
    assert HeadDecay(3)(torch.zeros(1, 1, 1)).tolist() == pytest.approx(
        [math.log(1 - 1 / 32), math.log(1 - 1 / 64), math.log(1 - 1 / 128)]
    )


def test_token_decay_starts_as_head_decay():
    decay = TokenDecay(5, 3)(torch.zeros(2, 4, 5))
    torch.testing.assert_close(decay, HeadDecay(3)(torch.zeros(1, 1, 1))[None, :, None].expand(2, 3, 4))


@pytest.mark.parametrize(("decay", "shape"), [(TokenDecay(5, 3), (2, 3, 4)), (ChannelDecay(5, 3, 7), (2, 3, 4, 7))])
def test_learned_decays(decay, shape):
    x = torch.randn(2, 4, 5) * 10
    out = decay(x)
    assert out.shape == shape
    assert (out <= 0).all()
    assert not torch.equal(out[0], out[1])
    assert decay.bfloat16()(x.bfloat16()).dtype == torch.float32


def test_heads_of_an_encoder_begin_near_and_far():
    """They keep σ(0) to σ(5) of what is one token away; in a model too, whose weights are drawn anew."""
    kept = torch.linspace(0, 5, 3).sigmoid()
    decay = TokenDecay(5, 3, both_sides=True)(torch.zeros(2, 4, 5))
    torch.testing.assert_close(decay.exp(), kept[:, None].expand(2, 3, 4))
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "decay": "token"}
    layer = TarnnForMaskedLM(TarnnConfig(**sizes, causal=False)).model.layers[0].attention
    for each in (layer.decay, layer.decay_back):
        torch.testing.assert_close(each(torch.zeros(1, 1, 12)).exp().flatten(), kept)
    decoder = TarnnForCausalLM(TarnnConfig(**sizes)).model.layers[0].attention.decay
    assert (decoder(torch.zeros(1, 1, 12)).exp() > 0.9).all()
