"""RWKV-7 as a kind of attention: the first layer of a model of RWKV's, its ranks, and what it refuses."""

import torch
from support.rwkv_models import HEADS, HIDDEN, rwkv_model
from torch.nn.functional import pad

from tarnn.attention import Rwkv7Attention
from tarnn.attention.rwkv7_layer import low_ranks
from tarnn.models import TarnnConfig, TarnnModel


@torch.no_grad()
def test_it_is_the_first_layer_of_an_rwkv_model():
    model = rwkv_model()
    time_mixing = model.blocks[0].att
    layer = Rwkv7Attention(HIDDEN, HEADS, causal=True).double()
    sizes = {name: x.shape for name, x in layer.mixing.named_parameters()}
    weights = {
        # products of a smaller rank, with zeros for the rest
        name: pad(x, (0, sizes[name][-1] - x.shape[-1], 0, sizes[name][-2] - x.shape[-2])) if x.ndim == 2 else x
        for name, x in time_mixing.state_dict().items()
    }
    layer.mixing.load_state_dict(weights)
    x = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(0)).double()
    zeros = model.new_state(2).layers[0]
    expected, S, last, _ = time_mixing(x, zeros.S, zeros.attention_input, None)
    y, state = layer(x, return_state=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state.S, S)
    assert torch.equal(state.last, last)


def test_ranks_are_those_of_the_papers_models():
    assert low_ranks(768) == {"w": 64, "a": 64, "g": 128}
    assert low_ranks(2048) == {"w": 96, "a": 96, "g": 256}


@torch.no_grad()
def test_a_model_starts_as_its_layers_do():
    """Transformers draws weights anew: parameters that are no projection start as in the layer alone."""
    model = TarnnModel(TarnnConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, attention="rwkv7"))
    mixing, alone = model.layers[0].attention.mixing, Rwkv7Attention(32, 2, causal=True).mixing
    for name, x in mixing.named_parameters(recurse=False):
        if name.endswith("2"):
            torch.testing.assert_close(x.mT @ x, 0.01 * torch.eye(32))
        else:
            assert torch.equal(x, alone.get_parameter(name)), name
    assert 0 < mixing.output.weight.std() < mixing.key.weight.std()
