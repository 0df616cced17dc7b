"""One layer, from its formula."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, silu


class Half(nn.Module):
    """Stands where dropout stands, to show where that is."""

    def forward(self, x):
        return x / 2


def test_pre_norm(make_model):
    """x ← x + drop(attention(norm x)); x ← x + drop(mlp(norm x)), with RMSNorm and SwiGLU."""
    block, x = make_model("linear").model.layers[1], torch.randn(2, 5, 32, dtype=torch.float64)
    block.dropout = Half()

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    y = x + block.attention(norm(x, block.attention_norm.weight)) / 2
    u = norm(y, block.mlp_norm.weight)
    inner = silu(u @ block.mlp.gate_proj.weight.T) * (u @ block.mlp.up_proj.weight.T)
    torch.testing.assert_close(block(x), y + inner @ block.mlp.down_proj.weight.T / 2)


def test_post_norm(make_model):
    """x ← norm(x + drop(attention(x))); x ← norm(x + drop(mlp(x))), with LayerNorm and GELU."""
    block, x = make_model("paper").model.layers[1], torch.randn(2, 5, 32, dtype=torch.float64)
    block.dropout = Half()

    def norm(x, module):
        return layer_norm(x, (32,), module.weight, module.bias, 1e-5)

    y = norm(x + block.attention(x) / 2, block.attention_norm)
    out = block.mlp.down_proj(gelu(block.mlp.up_proj(y)))
    torch.testing.assert_close(block(x), norm(y + out / 2, block.mlp_norm))


@pytest.mark.parametrize("kind", ["linear", "paper"])
def test_the_embedding_is_dropped_out_too(make_model, ids, kind):
    model, x = make_model(kind).model, ids(2, 5)
    before = model.embed(x, torch.arange(5)[None])
    model.dropout = Half()
    torch.testing.assert_close(model.embed(x, torch.arange(5)[None]), before / 2)
