"""Sliding window + sinks and Longformer, against dense masks and transformers' Longformer."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, masked_softmax, past, pieces
from torch import nn
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SIDES = pytest.mark.parametrize("causal", [False, True])


def distance(t):
    return torch.arange(t)[:, None] - torch.arange(t)


@SIDES
def test_window_and_sinks_are_their_definition(causal):
    layer, x = build(ROWS["window"], causal), inputs(2, 19, 14)
    seen = (distance(19).abs() < 4) | (torch.arange(19) < 2)
    seen = seen & past(19) if causal else seen
    q, k, v, real = pieces(layer, x)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), masked_softmax(q, k, v, seen), **CLOSE)


@SIDES
def test_longformer_is_its_definition(causal):
    layer, x, t = build(ROWS["longformer"], causal), inputs(2, 19, 14), 19
    seen = (distance(t).abs() <= 3) | (torch.arange(t) < 2)
    seen = seen & past(t) if causal else seen
    q, k, v, real = pieces(layer, x)
    local = masked_softmax(q, k, v, seen)
    own = (layer.heads(p(x), 4) for p in (layer.global_q_proj, layer.global_k_proj, layer.global_v_proj))
    everything = masked_softmax(*own, past(t) if causal else torch.ones(t, t, dtype=torch.bool))
    expected = torch.cat([everything[:, :, :2], local[:, :, 2:]], dim=2)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)


def test_longformer_is_that_of_transformers():
    """With the weights of its layer, global tokens and padding behind."""
    config = LongformerConfig(
        hidden_size=20, num_attention_heads=4, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double().eval()
    ours = build(ROWS["longformer"], hidden_size=20, bias=True, reach=4, global_tokens=3)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    names |= {f"{theirs_}_global": f"global_{ours_}" for theirs_, ours_ in names.items()}
    for theirs_, ours_ in names.items():
        getattr(ours, ours_).load_state_dict(getattr(theirs, theirs_).state_dict())
    ours.o_proj = nn.Identity()
    x, real = inputs(2, 24, 20), torch.ones(2, 24, dtype=torch.bool)
    real[1, 17:] = False
    kind = torch.zeros(2, 24).masked_fill(~real, -10000.0)
    kind[:, :3] = 10000.0
    y = theirs(x, kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=True)[0]
    torch.testing.assert_close(ours(x, key_mask=real)[real], y[real], rtol=1e-5, atol=1e-6)  # its softmax is float32
