"""Mamba-2 beside transformers' layer, and what it refuses."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from tarnn.attention import Mamba2Attention
from tarnn.models import TarnnConfig

HIDDEN, HEADS, DIM, STATE, WIDTH = 20, 5, 8, 6, 3


def theirs():
    """Transformers' layer, with one group of keys."""
    config = Mamba2Config(
        hidden_size=HIDDEN,
        expand=HEADS * DIM // HIDDEN,
        num_heads=HEADS,
        head_dim=DIM,
        state_size=STATE,
        n_groups=1,
        conv_kernel=WIDTH,
        chunk_size=16,
        num_hidden_layers=1,
        vocab_size=7,
    )
    torch.manual_seed(0)
    layer = Mamba2Mixer(config, 0).float().eval()
    with torch.no_grad():
        layer.D.uniform_(0.5, 1.5)
        layer.norm.weight.uniform_(0.5, 1.5)
    return layer


def ours(layer):
    """Our layer with the weights of transformers'."""
    sizes = {"head_dim": DIM, "state_size": STATE, "filter_width": WIDTH}
    module = Mamba2Attention(HIDDEN, HEADS, causal=True, **sizes)
    names = {"out_proj.weight": "o_proj.weight", "conv1d.weight": "filters", "conv1d.bias": "filter_bias"}
    weights = {names.get(name, name): x for name, x in layer.state_dict().items()}
    module.load_state_dict(weights | {"filters": weights["filters"][:, 0]})
    return module


@torch.no_grad()
def test_it_is_transformers_layer():
    layer = theirs()
    x = torch.randn(2, 70, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(layer)(x), layer(x), rtol=1e-4, atol=1e-5)


def test_it_starts_as_the_paper_says():
    torch.manual_seed(0)
    module = Mamba2Attention(64, 32, causal=True)
    dt, A = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 0.001 <= dt.min() < 0.004 < 0.03 < dt.max() <= 0.1
    assert 1 <= A.min() < 3 < 14 < A.max() <= 16


@pytest.mark.parametrize("how", [{"causal": False}, {"causal": False, "context_size": 8}])
def test_it_needs_an_order(how):
    with pytest.raises(ValueError, match="Mamba-2 layer is a recurrence over its own input"):
        Mamba2Attention(HIDDEN, HEADS, head_dim=DIM, **how)


@pytest.mark.parametrize(("option", "value"), [("filter_width", 32), ("state_size", 0), ("state_size", 4.0)])
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=option):
        TarnnConfig(attention="mamba2", attention_options={"mamba2": {option: value}})
