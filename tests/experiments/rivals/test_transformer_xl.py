"""Transformer-XL is a loop over segments that keeps inputs without their gradient, and XLNet's attention to its memory."""

import pytest
import torch
from support.segments import attended
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from experiments.rivals.transformer_xl import TransformerXL
from tarnn.attention import Rotary


def layer_of(**options):
    torch.manual_seed(0)
    layer = TransformerXL(12, 3, causal=True, **options).double()
    for bias in (layer.u, layer.w):
        torch.nn.init.normal_(bias)
    return layer


def by_segments(layer, x):
    out, past = [], x[:, :0]
    for segment in x.split(layer.segment, dim=1):
        out.append(attended(layer, segment, past))
        past = torch.cat([past, segment.detach()], 1)[:, -layer.memory :]
    return torch.cat(out, 1)


@pytest.mark.parametrize(("segment", "memory"), [(4, 4), (3, 7), (5, 2), (16, 4)])
def test_it_is_a_loop_over_segments_in_value_and_gradient(segment, memory):
    layer, gradients = layer_of(segment=segment, memory=memory), []
    torch.manual_seed(1)
    x, weight = torch.randn(2, 14, 12, dtype=torch.float64), torch.randn(2, 14, 12, dtype=torch.float64)
    wanted = [x.requires_grad_(), *layer.parameters()]
    outputs = layer(x), by_segments(layer, x)
    torch.testing.assert_close(*outputs)
    for y in outputs:
        gradients.append(torch.autograd.grad((y * weight).sum(), wanted))
    torch.testing.assert_close(*gradients)


def test_no_gradient_goes_into_the_memory():
    layer, x = layer_of(segment=4, memory=4), torch.randn(1, 8, 12, dtype=torch.float64, requires_grad=True)
    layer(x)[:, 4:].sum().backward()
    assert x.grad[:, :4].abs().max() == 0
    assert x.grad[:, 4:].abs().min() > 0


@torch.no_grad()
def test_it_agrees_with_xlnet():
    """XLNet's layer with `mems` is the second of two segments."""
    ours, x = layer_of(segment=5, memory=5), torch.randn(2, 10, 12, dtype=torch.float64)
    config = XLNetConfig(
        d_model=12, n_head=3, n_layer=1, d_inner=4, vocab_size=8, attn_type="uni", dropout=0.0, bi_data=False
    )
    theirs = XLNetRelativeAttention(config).double().eval()
    for name, projection in (("q", ours.q_proj), ("k", ours.k_proj), ("v", ours.v_proj), ("r", ours.r_proj)):
        getattr(theirs, name).copy_(projection.weight.T.reshape(12, 3, 4))
    theirs.r_w_bias.copy_(ours.u[:, 0, 0])
    theirs.r_r_bias.copy_(ours.w[:, 0, 0])
    h, memory = x[:, 5:].transpose(0, 1), x[:, :5].transpose(0, 1)
    model = XLNetModel(config)
    r = model.relative_positional_encoding(5, 10, bsz=2).double()
    future = torch.ones(5, 5, dtype=torch.float64).triu(1)
    mask = torch.cat([torch.zeros(5, 5, dtype=torch.float64), future], 1)[..., None, None]
    source = torch.cat([memory, h])
    q, k, v = (torch.einsum("tbm,mhd->tbhd", y, w) for y, w in ((h, theirs.q), (source, theirs.k), (source, theirs.v)))
    o = theirs.rel_attn_core(q, k, v, torch.einsum("tbm,mhd->tbhd", r, theirs.r), attn_mask=mask.expand(5, 10, 2, 1))
    torch.testing.assert_close(ours(x)[:, 5:], ours.o_proj(o.flatten(2).transpose(0, 1)))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="TransformerXL is defined for decoders: pass causal=True"):
        TransformerXL(12, 3, causal=False)
    with pytest.raises(ValueError, match="relative positions of its own: leave rotary out"):
        TransformerXL(12, 3, causal=True, rotary=Rotary(4))
