"""The convolution in a block: its formula, and that padding, packing, pieces and steps change nothing."""

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from tarnn.huggingface.backbone import TarnnBlock
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnModel
from tarnn.models.config import ModelConfig
from tarnn.models.convolution import Convolution

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def config(**options) -> ModelConfig:
    return ModelConfig(**SMALL | {"conv_kernel": 5} | options)


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula(causal):
    layer = Convolution(config(bias=True), causal=causal).double()
    x = torch.randn(2, 9, 16).double()
    before = pad(x.mT, (4, 0) if causal else (2, 2))
    filtered = conv1d(before, layer.weight[:, None], layer.bias, groups=16).mT
    torch.testing.assert_close(layer(x), layer.out_proj(silu(filtered)))


@pytest.mark.parametrize("options", [{}, {"norm_position": "post", "norm": "layer"}], ids=["pre", "post"])
def test_it_stands_before_attention(options):
    torch.manual_seed(0)
    block = TarnnBlock(config(**options), 0).double().eval()
    x = torch.randn(2, 7, 16).double()

    def join(x, sublayer, norm):
        return x + sublayer(norm(x)) if block.pre_norm else norm(x + sublayer(x))

    expected = join(x, block.convolution, block.convolution_norm)
    expected = join(expected, block.attention, block.attention_norm)
    torch.testing.assert_close(block(x), join(expected, block.mlp, block.mlp_norm))


ENCODER = SMALL | {"causal": False, "decay": "token", "position": "none", "conv_kernel": 5, "vocab_size": 31}


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_an_encoder_that_fades_sees_order(decay):
    """Without positions; padded rows are as alone, and packed documents too."""
    torch.manual_seed(0)
    model = TarnnModel(TarnnConfig(**ENCODER | {"decay": decay, "initializer_range": 0.3})).double().eval()
    ids = torch.randint(0, 31, (2, 9))
    out = model(ids).last_hidden_state
    turned = model(ids.flip(1)).last_hidden_state.flip(1)
    assert not torch.allclose(out, turned)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[:, 9:] = 0
    padded = model(pad(ids, (0, 3), value=5), attention_mask=mask).last_hidden_state[:, :9]
    torch.testing.assert_close(padded, out)
    packed = model(ids.view(1, 18), cu_seqlens=torch.tensor([0, 9, 18], dtype=torch.int32)).last_hidden_state
    torch.testing.assert_close(packed.view_as(out), out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_kernel": 0}, "conv_kernel must be a positive integer; got 0"),
        ({"conv_kernel": 32}, "conv_kernel must be from 1 to 31 tokens, or null; got 32"),
        ({"front": "conv"}, r"tokens \(input_size = null\) have none, got subsampling = 1 and front = 'conv'"),
        ({"front": "conv", "input_size": 4, "subsampling": 6}, "must be 2, 4, 8 …; got 6"),
        ({"front": "mel", "input_size": 4}, "front must be one of stack, conv; got 'mel'"),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", ["softmax", "linear"]])
def test_generation_in_every_way(attention):
    """With a cache and without, by steps in place, and by beams."""
    torch.manual_seed(0)
    made = TarnnConfig(
        **SMALL, conv_kernel=4, vocab_size=31, attention=attention, initializer_range=0.5, pad_token_id=0
    )
    model, prompt = TarnnForCausalLM(made).double().eval(), torch.randint(3, 31, (2, 5))
    alone = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), alone)
    mask = pad(torch.ones(2, 5, dtype=torch.int64), (2, 0))
    padded = model.generate(pad(prompt, (2, 0)), attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(padded[:, 2:], alone)
    logits, state = model.prefill(prompt, model.new_state(2, capacity=13), inplace=True)
    tokens = [prompt]
    for _ in range(8):
        tokens.append(logits.argmax(-1, keepdim=True))
        logits, state = model.step(tokens[-1][:, 0], state, inplace=True)
    assert torch.equal(torch.cat(tokens, 1), alone)
    beams = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    assert torch.equal(model.generate(prompt, **beams), model.generate(prompt, **beams, use_cache=False))


@pytest.mark.compile
@torch.no_grad()
def test_a_step_can_be_exported():
    model = TarnnForCausalLM(TarnnConfig(**SMALL, conv_kernel=4, vocab_size=31)).eval()

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, state):
            return self.model.step(ids, state)

    ids, state = torch.tensor([3, 7]), model.new_state(2)
    exported = torch.export.export(Step(), (ids, state), strict=False).module()
    for _ in range(2):
        expected, after = model.step(ids, state)
        logits, state = exported(ids, state)
        torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(state.tensors(), after.tensors())
