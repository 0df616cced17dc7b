"""Models of transformers with a fused step, patched: `generate` by it writes what `forward` writes."""

import copy

import pytest
import torch
import transformers as hf
from support.fused_texts import LONG, WAYS, generated
from support.linear_families import DELTA, FAMILIES as LINEAR, HEADS, TOKENS, linear_model
from transformers import DynamicCache

import tarnn
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.huggingface.described import classes_of
from tarnn.huggingface.described.gated_delta import CLASSES
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.huggingface.versions import as_called, cache_of
from tarnn.huggingface.why_not_fused import why_not_fused
from tarnn.kernels.cpu import library
from tarnn.models.state import ModelState
from tarnn.ops import KVCache

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore"),
]
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
FAMILIES = {
    "Qwen3-Next": lambda **more: hf.Qwen3NextConfig(**HEADS, **DELTA, num_experts=0, **ROTARY, **more),
    "Qwen3.5": lambda **more: hf.Qwen3_5TextConfig(**HEADS, **DELTA, **ROTARY, **more),
    "OLMo-hybrid": lambda **more: hf.OlmoHybridConfig(**HEADS, **DELTA | {"linear_num_key_heads": 4}, **more),
    "Mamba-2": LINEAR["Mamba-2"],
}


def made(name, **more):
    model = linear_model(name, FAMILIES[name](**more))
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1 and name != "Mamba-2":  # vectors that start as zeros or ones
                x.add_(0.3 * torch.randn_like(x))
    return model


@pytest.fixture(params=FAMILIES)
def model(request):
    model = made(request.param)
    with tarnn.patch_transformers():
        yield model


@pytest.mark.parametrize("way", ["beams", "penalties"])
def test_the_same_text(model, tokens, way):
    """Greedy and sampled texts, padded ones too, are those of 200 prompts."""
    x = TOKENS[:, :12]
    expected = generated(model, x, None, **WAYS[way])
    assert not tokens
    assert torch.equal(generated(model, x, "float32", **WAYS[way]), expected)
    assert tokens == [12, *[1] * 19]
    assert torch.equal(model.generate(x, **LONG), generated(model, x, None))
    assert tokens[20:] == [1] * 11  # by default after some tokens


@torch.no_grad()
def test_in_bfloat16_to_the_bit_what_its_copy_in_float32_gives(model):
    """By FusedStep; `generate` goes on by forward, and says so."""
    assert why_not_fused(model) is None
    logits = []
    for weights in (None, "bfloat16"):
        step = FusedStep(model.bfloat16() if weights is None else model.float(), weights, classes=classes_of(model))
        assert step.weights == "bfloat16"
        layers = (x.map(lambda y: torch.zeros(2, *y.shape[1:], device="cpu")) for x in step.new_row)
        layers = tuple(x.with_room(40) if isinstance(x, KVCache) else x for x in layers)
        state = ModelState(layers, torch.zeros(2, dtype=torch.int64))
        logits.append(step.prefill(TOKENS[:2, :40], state, every=True)[0])
    assert logits[0].std() > 0.05
    assert torch.equal(*logits)


def test_generate_of_a_model_in_bfloat16_says_why_it_computes_by_forward(model, tokens):
    model.bfloat16()
    with pytest.warns(UserWarning, match="by forward: its weights are torch.bfloat16"), fused_forward(model):
        model.generate(TOKENS[:2, :12], **LONG)
    assert not tokens
    assert why_not_fused(model).startswith("its weights are torch.bfloat16")


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_caches_are_those_of_forward(model, padded):
    """Tokens by the fused step and by forward in turns on one cache, pieces of a prompt too; by forward alone on another."""
    mask, at = torch.ones_like(TOKENS[:, :40]), 0
    if padded:
        mask[0, :4] = 0
    one, other = (DynamicCache(config=model.config) for _ in range(2))
    for i, n in enumerate([6, 1, 1, 1, 9, 1, 1, 7, 1, 1, 1, 1, 2, 1]):
        piece = TOKENS[:, at : at + n]
        at += n
        options = {"attention_mask": mask[:, :at], "use_cache": True}
        if of_attention := model.config.model_type != "mamba2":
            options["position_ids"] = mask[:, :at].cumsum(-1)[:, -n:] - 1
        with fused_forward(model, None if i in (2, 5, 6, 9) else "float32"):
            found = model(piece, **as_called(model.forward, one), **options)
        expected = model(piece, **as_called(model.forward, other), **options)
        real = mask[:, at - n : at].bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
        assert cache_of(found) is one
        assert not of_attention or one.get_seq_length() == other.get_seq_length() == at
    kept = mask[:, :at].bool()
    for layer, alone in zip(one.layers, other.layers, strict=True):
        for name in ("recurrent_states", "conv_states") if hasattr(layer, "recurrent_states") else ("keys", "values"):
            x, y = getattr(layer, name), getattr(alone, name)
            x, y = (x[0], y[0]) if "states" in name else (z.transpose(1, 2)[kept] for z in (x, y))
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_cache_goes_on_and_a_copy_of_it_by_itself(model, tokens):
    first = generated(model, TOKENS[:, :12], "float32", return_dict_in_generate=True, use_cache=True)
    cache, fork = cache_of(first), copy.deepcopy(cache_of(first))
    more = TOKENS[:, 30:35]
    read = torch.cat([first.sequences, more], 1)
    expected = generated(model, read, None)
    del tokens[:]
    for held in (cache, fork):
        with fused_forward(model, "float32"), torch.no_grad():
            token, text = torch.cat([first.sequences[:, -1:], more], 1), []  # a text's last token was not read yet
            for _ in range(20):
                out = model(token, **as_called(model.forward, held), use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
                text.append(token)
        assert torch.equal(torch.cat(text, 1), expected[:, read.shape[1] :])
    assert tokens == [6, *[1] * 19] * 2


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2"])
def test_one_model_alone(name, tokens):
    model = made(name)
    expected = model.generate(TOKENS[:, :12], **LONG)
    with tarnn.patch_transformers(model):
        assert torch.equal(generated(model, TOKENS[:, :12], "float32"), expected)
        assert tokens == [12, *[1] * 19]
        assert torch.equal(made(name).generate(TOKENS[:, :12], **LONG), expected)
    assert torch.equal(generated(model, TOKENS[:, :12], "float32"), expected)
    assert len(tokens) == 20


EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
REFUSED = {
    "model.layers.0.mlp (Qwen3NextSparseMoeBlock) does not describe itself": hf.Qwen3NextConfig(
        **HEADS, **DELTA, **EXPERTS
    ),
    "model.rotary_emb (Qwen3_5TextRotaryEmbedding) scales positions (linear)": hf.Qwen3_5TextConfig(
        **HEADS, **DELTA, **SCALED
    ),
    "model.layers.0.linear_attn (Qwen3_5GatedDeltaNet) has gelu behind its filters, not silu": hf.Qwen3_5TextConfig(
        **HEADS, **DELTA, hidden_act="gelu"
    ),
    "norms of queries, keys and outputs are RMSNorms with eps = 1e-06 there": hf.OlmoHybridConfig(
        **HEADS, **DELTA, rms_norm_eps=1e-4
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_does_not_take_it_names(why):
    model = linear_model("Qwen3.5", REFUSED[why])
    assert refusal(model, CLASSES) == why
    with tarnn.patch_transformers():
        assert torch.equal(generated(model, TOKENS[:, :9], "float32"), generated(model, TOKENS[:, :9], None))
