"""Layers in the place of nn.MultiheadAttention, and what users of that expect of a layer."""

import pytest
import torch
from torch import nn

from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention, TorchMultihead

CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)
PADDING = torch.arange(7) >= torch.tensor([[7], [4], [6]])  # True = left out, as torch has it


def encoder(attention=LinearAttention, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn = TorchMultihead(attention(16, 4, **options))
    return layer


@pytest.mark.parametrize("train", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    ("causal", "masks"),
    [
        (False, {}),
        (False, {"src_key_padding_mask": PADDING}),
        (False, {"src_mask": PADDING[1].expand(7, 7)}),
        (True, {"src_mask": CAUSAL}),
        (True, {"src_mask": CAUSAL, "is_causal": True}),
        (True, {"src_mask": CAUSAL, "src_key_padding_mask": PADDING.float().masked_fill(PADDING, -torch.inf)}),
        (True, {"src_mask": (CAUSAL < 0) | PADDING[:, None].repeat_interleave(4, 0)}),
    ],
    ids=["none", "padding", "padding as a mask", "causal", "causal by name", "both", "both in one"],
)
def test_an_encoder_layer_is_that_with_the_same_masks(train, causal, masks):
    """With softmax attention and torch's own weights: exactly what torch computes itself."""
    theirs = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(train)
    ours = encoder(SoftmaxAttention, causal=causal, bias=True).train(train)
    weights = theirs.state_dict()
    layer = ours.self_attn.layer
    for i, projection in enumerate((layer.q_proj, layer.k_proj, layer.v_proj)):
        projection.weight.data = weights["self_attn.in_proj_weight"].chunk(3)[i]
        projection.bias.data = weights["self_attn.in_proj_bias"].chunk(3)[i]
    layer.o_proj.load_state_dict({x: weights[f"self_attn.out_proj.{x}"] for x in ("weight", "bias")})
    rest = {x: y for x, y in weights.items() if "self_attn" not in x}
    assert not ours.load_state_dict(rest, strict=False).unexpected_keys
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(ours(x, **masks), theirs(x, **masks), rtol=1e-4, atol=1e-5)


def test_linear_attention_learns_in_torchs_encoder_and_decoder():
    model = nn.TransformerEncoder(encoder(causal=False), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    decoder.self_attn = TorchMultihead(LinearAttention(16, 4, causal=True))
    decoder.multihead_attn = TorchMultihead(LinearAttention(16, 4, causal=False, context_size=16))
    memory = model(torch.randn(3, 7, 16), src_key_padding_mask=PADDING)
    y = decoder(torch.randn(3, 7, 16), memory, tgt_mask=CAUSAL, memory_key_padding_mask=PADDING)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (*model.parameters(), *decoder.parameters()))


x, other = torch.randn(3, 7, 16), torch.randn(3, 7, 16)
WINDOW = torch.ones(7, 7).tril().triu(-2) == 0


@pytest.mark.parametrize(
    ("causal", "arguments", "options", "message"),
    [
        (False, (x, x, x), {"attn_mask": CAUSAL}, r"\(causal=False\) attn_mask must be padding, .*another \(7, 7\)"),
        (True, (x, x, x), {"attn_mask": WINDOW}, r"\(causal=True\) attn_mask must be the causal one"),
        (True, (x, x, x), {"attn_mask": torch.zeros(7, 7)}, "must be the causal one"),
        (True, (x, x, x), {"attn_mask": 0.5 * torch.ones(7, 7)}, "adds no bias"),
        (False, (x, x, x), {"is_causal": True}, "needs a layer that was made with causal=True"),
        (False, (x, x, x), {"need_weights": True}, "never formed; pass need_weights=False"),
        (False, (x, other, other), {}, "one tensor as query, key and value"),
        (False, (x, x, other), {}, "got different ones"),
    ],
)
@pytest.mark.refusals
def test_refusals(causal, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        TorchMultihead(LinearAttention(16, 4, causal=causal))(*arguments, **options)


def test_dropout_is_that_of_the_output_in_training_only():
    for kind in (LinearAttention, SoftmaxAttention, NoAttention):
        torch.manual_seed(0)
        layer, x = kind(64, 4, causal=True, dropout=0.25), torch.randn(2, 50, 64)
        whole, dropped = layer.eval()(x), layer.train()(x)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
        assert abs(kept.float().mean() - 0.75) < 0.03  # five standard deviations of 6,400 draws


@pytest.mark.refusals
def test_a_step_says_what_it_takes():
    layer = LinearAttention(8, 2, causal=True)
    state = layer.new_state(3)
    for shape in ((3, 8), (3, 1, 9), (3, 2, 8)):
        with pytest.raises(ValueError, match=r"step takes one token, \(b, 1, hidden\); got .* pass x\[:, None\]"):
            layer.step(torch.randn(shape), state)


def test_a_map_of_ones_own_that_is_found_signed_is_warned_of():
    class Plain(nn.Module):
        def forward(self, x):
            return x

    with pytest.warns(UserWarning, match="Plain gave negative weights"):
        LinearAttention(8, 2, causal=True, feature_map=Plain())
    LinearAttention(8, 2, causal=True, feature_map=Plain(), normalize=False)
    refused = Plain()
    refused.positive = False
    with pytest.raises(ValueError, match=r"Plain may give negative weights.*normalize=False"):
        LinearAttention(8, 2, causal=True, feature_map=refused)
