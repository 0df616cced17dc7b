"""Models of transformers with a fused step, patched: `generate` by it writes what `forward` writes."""

import copy

import pytest
import torch
import transformers as hf
from support.fused_texts import LONG, WAYS, generated
from support.linear_families import CONVOLUTION, DELTA, FAMILIES as LINEAR, HEADS, TOKENS, linear_model
from transformers import DynamicCache

import tarnn
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.huggingface.versions import as_called, cache_of
from tarnn.huggingface.why_not_fused import why_not_fused
from tarnn.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore"),
]
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    "Qwen3-Next": lambda **more: hf.Qwen3NextConfig(**HEADS, **DELTA, num_experts=0, **ROTARY, **more),
    "Qwen3-Next, experts": lambda **more: hf.Qwen3NextConfig(**HEADS, **DELTA, **EXPERTS, **ROTARY, **more),
    "Qwen3.5": lambda **more: hf.Qwen3_5TextConfig(**HEADS, **DELTA, **ROTARY, **more),
    "OLMo-hybrid": lambda **more: hf.OlmoHybridConfig(**HEADS, **DELTA | {"linear_num_key_heads": 4}, **more),
    "LFM2": lambda **more: hf.Lfm2Config(**HEADS, **CONVOLUTION, **more),
    "Mamba-2": LINEAR["Mamba-2"],
}


def made(name, **more):
    model = linear_model(name, FAMILIES[name](**more))
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1 and name != "Mamba-2":  # vectors that start as zeros or ones
                x.add_(0.3 * torch.randn_like(x))
            if x.ndim == 2 and not x[0].any():  # the embedding of padding, for which all experts would be equally good
                x[0].normal_(std=0.1)
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
    assert tokens[20:] == tokens[:20]  # by default, too


@torch.no_grad()
def test_in_bfloat16_to_the_bit_what_its_copy_in_float32_gives(model):
    assert why_not_fused(model) is None
    logits, wide = [], copy.deepcopy(model)
    wide.load_state_dict(model.bfloat16().state_dict())
    for each, weights in ((model, None), (wide, "bfloat16")):
        step = FusedStep(each, weights)
        assert step.weights == "bfloat16"
        logits.append(step.prefill(TOKENS[:2, :40], step.new_state(2, 40), every=True)[0])
    assert logits[0].std() > 0.05
    assert torch.equal(*logits)


# and the format in which weights are packed by default
SIXTEEN = {torch.bfloat16: "bfloat16", torch.float16: "float32"}


@torch.no_grad()
@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_in_16_bits_a_model_writes_what_its_folder_does(model, dtype, weights, tokens, tmp_path):
    """`generate`, `tarnn.load(model)` and `tarnn.load(folder)`: logits to the bit, states of recurrences in float32."""
    model.to(dtype).save_pretrained(tmp_path)
    kind, x = (SIXTEEN[dtype] if weights == "stored" else weights), TOKENS[:1, :12]
    folder = tarnn.load(tmp_path, None if weights == "stored" else weights, tokenizer=object()).opened
    live = tarnn.load(model, None if weights == "stored" else weights, tokenizer=object()).opened
    assert folder.weights == live.weights == kind
    assert torch.equal(*(opened.prefill(x, opened.new_state(1, 12), every=True)[0] for opened in (folder, live)))
    del tokens[:]
    options = {"return_dict_in_generate": True, "output_logits": True, "use_cache": True}
    out = generated(model, x, weights, **options)
    assert tokens == [12, *[1] * 19]
    state = folder.new_state(1, 40, cache_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    step, text = folder.prefill(x, state, inplace=True), out.sequences[0, 12:].tolist()
    for token, found in zip(text, out.logits, strict=True):
        assert torch.equal(found, step[0])
        step = folder.step(torch.tensor([token]), step[1], inplace=True)
    for layer in cache_of(out).layers:
        if not hasattr(layer, "recurrent_states"):
            assert layer.keys.dtype == dtype
            continue
        S = layer.recurrent_states[0]
        assert S is None or S.dtype == torch.float32
        assert layer.conv_states[0].dtype == dtype


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_in_16_bits_forward_and_the_step_go_on_with_each_other(model, dtype, padded):
    """In turns on one cache: no further from the model in float32 than twice what `forward` alone is."""
    if getattr(model.config, "num_experts", 0):
        pytest.skip("a token between two experts may get the other one")
    model.to(dtype)
    wide, mask, at = copy.deepcopy(model).float(), torch.ones_like(TOKENS[:, :40]), 0
    if padded:
        mask[0, :4] = 0
    ways = {"both": model, "forward": model, "wide": wide}
    caches = {way: DynamicCache(config=model.config) for way in ways}
    errors = {"both": 0.0, "forward": 0.0}
    for i, n in enumerate([6, 1, 1, 1, 9, 1, 1, 7, 1, 1, 1, 1, 2, 1]):
        piece = TOKENS[:, at : at + n]
        at += n
        options = {"attention_mask": mask[:, :at], "use_cache": True}
        if model.config.model_type != "mamba2":
            options["position_ids"] = mask[:, :at].cumsum(-1)[:, -n:] - 1
        logits = {}
        for way, each in ways.items():
            by_step = way == "both" and i not in (2, 5, 6, 9)
            with fused_forward(each, "stored" if by_step else None):
                logits[way] = each(piece, **as_called(each.forward, caches[way]), **options).logits.float()
        real = mask[:, at - n : at].bool()
        for way in errors:
            errors[way] = max(errors[way], float((logits[way] - logits["wide"])[real].abs().max()))
    assert 0 < errors["both"] <= 2 * errors["forward"]


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
        for x, y in zip(held(layer, kept), held(alone, kept), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def held(layer, kept):
    """The tensors of a layer of a cache that count: of w inputs the last w − 1."""
    if not hasattr(layer, "recurrent_states"):
        return [x.transpose(1, 2)[kept] for x in (layer.keys, layer.values)]
    return [x for x in (layer.conv_states[0][:, :, 1:], layer.recurrent_states[0]) if x is not None]


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


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_of_inference_mode_goes_on_outside(rows, tokens):
    model, x = made("Qwen3.5"), TOKENS[:rows, :12]
    with tarnn.patch_transformers():
        expected = generated(model, x, None, max_new_tokens=21)
        with torch.inference_mode():
            first = generated(model, x, "float32", return_dict_in_generate=True)
        with torch.no_grad(), fused_forward(model):
            out = model(first.sequences[:, -1:], use_cache=True, **as_called(model.forward, cache_of(first)))
    assert tokens == [12, *[1] * 20]
    assert torch.equal(out.logits[:, -1].argmax(-1), expected[:, -1])


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


REFUSED = {"hidden_act must be 'silu'": hf.Qwen3_5TextConfig(**HEADS, **DELTA, hidden_act="gelu")}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_does_not_take_it_names(why):
    model = linear_model("Qwen3.5", REFUSED[why])
    assert why in refusal(model)
    with tarnn.patch_transformers():
        assert why_not_fused(model) == refusal(model)
        assert torch.equal(generated(model, TOKENS[:, :9], "float32"), generated(model, TOKENS[:, :9], None))


def test_a_model_that_was_changed_is_left_to_forward_by_place(tokens):
    model = made("Qwen3.5")
    model.model.layers[1].self_attn.scaling = 0.5
    with tarnn.patch_transformers():
        assert why_not_fused(model) == (
            "model.layers.1.self_attn (Qwen3_5Attention) has another scaling than its config says"
        )
        generated(model, TOKENS[:, :9], None)
        with pytest.warns(UserWarning, match="by forward: model.layers.1.self_attn"):
            generated(model, TOKENS[:, :9], "float32")
    assert not tokens


@torch.no_grad()
@pytest.mark.parametrize("places", [[1, 0, 1, 1], [0, 1, 0, 1]])
def test_padding_among_tokens_is_for_forward(places, tokens):
    """It keeps keys where they came, and so the masks of later tokens mean them."""
    model, mask = made("Qwen3.5"), torch.ones_like(TOKENS[:, :9])
    mask[0, :4] = torch.tensor(places)
    with tarnn.patch_transformers():
        generated(model, TOKENS[:, :9], "float32", attention_mask=mask)
    assert tokens == []
