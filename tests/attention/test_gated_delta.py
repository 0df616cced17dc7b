"""Gated DeltaNet beside transformers' layer, and what it refuses."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tarnn.attention import GatedDeltaAttention, LinearAttention, TokenDecay

HIDDEN, HEADS, DIM, WIDTH = 20, 3, 8, 4


def theirs():
    """Transformers' layer, whose decay is −e^A softplus(…), with A = 0."""
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM,
        linear_filter_width_dim=WIDTH,
    )
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(config, 0).float().eval()
    with torch.no_grad():
        layer.A_log.zero_()
        layer.dt_bias.uniform_(-1, 1)
        layer.norm.weight.uniform_(0.5, 1.5)
    return layer


def ours(layer):
    """Our layer with the weights of transformers'."""
    module = GatedDeltaAttention(
        HIDDEN, HEADS, causal=True, head_dim=DIM, decay=TokenDecay(HIDDEN, HEADS), filter_width=WIDTH
    )
    of_heads = layer.in_proj_qkvz.weight.view(HEADS, 4, DIM, HIDDEN)  # q, k, v, z of each head
    with torch.no_grad():
        for i, projection in enumerate((module.q_proj, module.k_proj, module.v_proj, module.gate_proj)):
            projection.weight.copy_(of_heads[:, i].flatten(0, 1))
        beta, decay = layer.in_proj_ba.weight.view(HEADS, 2, HIDDEN).unbind(1)
        module.beta_proj.weight.copy_(beta)
        module.decay.gate.weight.copy_(decay)
        module.decay.bias.copy_(layer.dt_bias)
        module.filters.copy_(layer.conv1d.weight[:, 0])
        module.norm.weight.copy_(layer.norm.weight)
        module.o_proj.weight.copy_(layer.out_proj.weight)
    return module


@torch.no_grad()
def test_it_is_transformers_layer():
    layer = theirs()
    x = torch.randn(2, 70, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(layer)(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [{"causal": False}, {"causal": False, "context_size": 8}])
def test_it_needs_an_order(how):
    with pytest.raises(ValueError, match="needs causal self-attention"):
        GatedDeltaAttention(HIDDEN, 2, head_dim=DIM, **how)


@pytest.mark.refusals
@pytest.mark.parametrize("width", [0, 32, 2.0, True])
def test_a_width_of_filters(width):
    with pytest.raises(ValueError, match=r"filter_width.*from 1 to 31"):
        GatedDeltaAttention(HIDDEN, 2, causal=True, head_dim=DIM, filter_width=width)


def test_other_kinds_have_no_filters():
    with pytest.raises(TypeError, match="filter_width"):
        LinearAttention(HIDDEN, 2, causal=True, filter_width=4)
