"""One layer, from its formula."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, silu

from tarnn.huggingface.backbone import TarnnBlock
from tarnn.models.config import ModelConfig


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


def test_without_a_feed_forward_and_with_squared_relu():
    """x ← x + attention(norm x), and x ← y + W₂ relu(W₁ norm y)² behind it."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16).double()
    for mlp in ("none", "squared_relu"):
        block = TarnnBlock(ModelConfig(hidden_size=16, num_attention_heads=2, mlp=mlp), 0).double().eval()
        expected = x + block.attention(block.attention_norm(x))
        if mlp == "squared_relu":
            y = block.mlp.up_proj(block.mlp_norm(expected)).clamp(min=0) ** 2
            expected = expected + y @ block.mlp.down_proj.weight.T
        torch.testing.assert_close(block(x), expected)
        assert any("mlp" in name for name in block.state_dict()) == (mlp != "none")


@pytest.mark.parametrize(
    "options", [{}, {"norm_position": "post", "norm": "layer", "mlp": "gelu"}], ids=["pre", "post"]
)
def test_cross_attention_stands_between_attention_and_mlp(options):
    """x ← x + cross(norm x, context) or norm(x + cross(x, context)); and the same from the state of the context."""
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **options)
    block = TarnnBlock(config, 0, context_size=10).double().eval()
    x, context = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 10).double()
    mask = torch.arange(7) < torch.tensor([[7], [4]])

    def join(x, sublayer, norm):
        return x + sublayer(norm(x)) if block.pre_norm else norm(x + sublayer(x))

    def read(x):
        return block.cross_attention(x, context, key_mask=mask)

    expected = join(x, block.attention, block.attention_norm)
    expected = join(expected, read, block.cross_norm)
    expected = join(expected, block.mlp, block.mlp_norm)
    torch.testing.assert_close(block(x, cross={"context": context, "key_mask": mask}), expected)

    _, read_once = block.cross_attention(x, context, key_mask=mask, return_state=True)
    torch.testing.assert_close(block(x, cross={"state": read_once}), expected)
    state = block.attention.new_state(2)
    first, _ = block.step(x[:, :1], state, cross={"state": read_once}, positions=torch.zeros(2, 1, dtype=torch.long))
    torch.testing.assert_close(first, expected[:, :1])


def test_a_block_with_cross_attention_needs_something_to_read():
    block = TarnnBlock(ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2), 0, context_size=10)
    with pytest.raises(ValueError, match="cross attention needs a context, or the state"):
        block(torch.randn(1, 3, 16))
