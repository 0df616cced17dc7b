"""Maps are the weights that a layer's output is made of, in models of ours and of transformers."""

import pytest
import torch
from support.families import FAMILIES, inputs_of, model_of
from torch import nn

import tarnn.conversion  # noqa: F401  its attention is known to transformers then
from tarnn.analysis.attention_maps import attention_maps
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnModel

SMALL = {
    "vocab_size": 11,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
}
KINDS = {
    "linear": {"position": "rotary", "decay": "none"},
    "both": {"attention": ["linear", "softmax"], "position": "rotary", "decay": "none"},
    "features": {"feature_map": "favor", "decay": "none"},
}


def ids(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


def made(kind, cls=TarnnForCausalLM, **options):
    torch.manual_seed(0)
    return cls(TarnnConfig(**SMALL, **KINDS[kind], **options)).double().eval()


def outputs_of(model):
    """What enters each layer's o_proj, and each layer's values, filled when the model runs."""
    found = {"o": [], "v": []}
    for block in model.layers:
        block.attention.o_proj.register_forward_pre_hook(lambda _, args: found["o"].append(args[0]))
        block.attention.v_proj.register_forward_hook(lambda *args: found["v"].append(args[2]))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_weights_times_values_is_the_output(kind, causal):
    model = made(kind, TarnnModel, causal=causal)
    inputs, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    maps = attention_maps(model, input_ids=inputs, attention_mask=mask, use_cache=False)
    seen = outputs_of(model)
    model(input_ids=inputs, attention_mask=mask, use_cache=False)
    assert [m.name for m in maps] == ["layers.0.attention", "layers.1.attention"]
    for found, o, v in zip(maps, seen["o"], seen["v"]):
        assert found.shape == (2, 4, 9, 9)
        weights = found.weights(block=4)
        values = v.unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, dim=1)
        torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), o)
        if kind == "features":  # rotated features are divided by the sum of plain ones
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9).double())
        assert not weights[1, :, :, 6:].any()
        assert bool(weights.triu(1).any()) != causal


def test_attention_to_groups_of_keys_is_a_sum_over_columns():
    found = attention_maps(made("linear"), input_ids=ids(1, 9), use_cache=False)[1]
    groups = torch.nn.functional.one_hot(ids(1, 9), 11).double()
    torch.testing.assert_close(found.onto(groups), found.weights() @ groups)


def test_softmax_layers_give_what_output_attentions_gives():
    model = made("both")
    maps = attention_maps(model, input_ids=ids(2, 7), use_cache=False)
    [expected] = model(input_ids=ids(2, 7), use_cache=False, output_attentions=True).attentions
    torch.testing.assert_close(maps[1].weights(), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT", "BART"])
def test_models_of_transformers_give_the_weights_of_their_eager_attention(family):
    model, inputs = model_of(FAMILIES[family]), inputs_of(FAMILIES[family].kind)
    given = next(reversed(inputs.values()))
    maps = attention_maps(model, **given, use_cache=False)
    model.set_attn_implementation("eager")
    out = model(**given, use_cache=False, output_attentions=True)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    expected = [x for name in names for x in getattr(out, name, None) or ()]
    real = given.get("attention_mask", torch.ones(2, 40)).bool()
    assert len(maps) == len(expected)
    for found in maps:
        weights, rows = (found.weights(block=16), real[:, None, : found.shape[2]].expand(-1, found.shape[1], -1))
        assert any(x.shape == weights.shape and torch.allclose(weights[rows], x[rows], atol=1e-5) for x in expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_converted_models(family):
    """With every key in the window, hybrid attention is softmax attention; linear attention's rows sum to one."""
    model, given = model_of(FAMILIES[family]), inputs_of(FAMILIES[family].kind)["right"]
    exact = attention_maps(model, **given, use_cache=False)
    real = given["attention_mask"].bool()[:, None].expand(-1, exact[0].shape[1], -1)
    model.set_attn_implementation("tarnn_hybrid")
    hybrid = attention_maps(model, **given, use_cache=False)
    for a, b in zip(hybrid, exact, strict=True):
        torch.testing.assert_close(a.weights()[real], b.weights()[real], rtol=1e-3, atol=1e-4)
    model.set_attn_implementation("tarnn_linear")
    for found in attention_maps(model, **given, use_cache=False):
        weights = found.weights()
        torch.testing.assert_close(weights.sum(-1)[real], torch.ones(int(real.sum())), rtol=1e-4, atol=1e-4)
        assert bool((weights.triu(1) > 0).any()) == (family == "BERT")


def test_what_has_no_maps_is_refused():
    with pytest.raises(ValueError, match=r'of this Linear can be looked into\. .*"sdpa"'):
        attention_maps(nn.Linear(3, 3), input=torch.ones(1, 3))
    model = made("linear")
    cache = model(input_ids=ids(1, 4), use_cache=True).cache
    with pytest.raises(ValueError, match=r"model\.layers\.0\.attention continues a sequence"):
        attention_maps(model, input_ids=ids(1, 2), cache=cache)
