"""Converted models by the fused step: the logits of `forward`, and the same texts from `generate`."""

import copy

import pytest
import torch
from support.families import FAMILIES, model_of
from support.fused_texts import generated
from support.linear_families import TOKENS, linear_model

import tarnn
from tarnn.conversion import constant_cache, set_options
from tarnn.conversion.options import converted_layers
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.opening import open_step
from tarnn.errors import UserError
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.huggingface.versions import CACHE
from tarnn.huggingface.why_not_fused import why_not_fused
from tarnn.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore"),  # what transformers has to say of random configs
]
NEAR = {"window": 6, "sinks": 2}
KINDS = {
    "window alone": NEAR | {"feature_map": None},
    "clusters": NEAR | {"feature_map": {"name": "clusters", "num_features": 19}},
    "clusters that end": {"window": 5, "sinks": 0, "feature_map": "clusters", "far_until": 20},
    "favor": NEAR | {"feature_map": {"name": "favor", "num_features": 70}, "far_until": 20},
    "centred and balanced": NEAR
    | {"feature_map": {"name": "oprf", "num_features": 40, "centre": True, "balance": True}},
    "elu": NEAR | {"feature_map": "elu"},
    "heads of every mode": NEAR | {"feature_map": "clusters", "mode": ["exact", "features"]},
    "window and features": NEAR | {"feature_map": "favor", "mode": ["window", "features"]},
    "exact": {"mode": "exact"},
    "long window": {"window": 600, "sinks": 3, "feature_map": None},
}
CASES = [("Llama", kind) for kind in KINDS] + [
    (family, "heads of every mode") for family in ("Mistral", "Qwen2", "Qwen3")
]


def converted(family="Llama", **options):
    torch.manual_seed(0)
    model = model_of(FAMILIES[family])
    model.set_attn_implementation("tarnn_hybrid")
    set_options(model, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def read(model, ids, weights="float32"):
    """Logits after each token, by steps and by one prefill, and the states behind."""
    step = FusedStep(model, weights)
    states = [step.new_state(len(ids), 64) for _ in range(2)]
    logits = []
    for token in ids.T:
        out, states[0] = step(token, states[0], inplace=True)
        logits.append(out)
    at_once, states[1] = step.prefill(ids, states[1], every=True)
    return torch.stack(logits, 1), at_once, states


@torch.no_grad()
@pytest.mark.parametrize("layers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_in_bfloat16_to_the_bit_what_its_copy_in_float32_gives(family, kind, layers):
    """layers: the type of what was converted."""
    model = converted(family, **KINDS[kind])
    wide = copy.deepcopy(model)
    wide.load_state_dict(model.bfloat16().state_dict())
    for layer in converted_layers(model).values():
        layer.to(layers)
    ids = torch.randint(99, (2, 12), generator=torch.Generator().manual_seed(1))
    found, _, states = read(model, ids, None)
    assert why_not_fused(model) is None
    expected, _, others = read(wide, ids, "bfloat16")
    assert torch.equal(found, expected)
    for x, y in zip(states[0].tensors().values(), others[0].tensors().values(), strict=True):
        assert torch.equal(x, y)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_forward_and_the_step_go_on_with_each_other(kind):
    """In turns on one cache: no further from the model in float32 than twice what `forward` alone is."""
    model = converted("Llama", **KINDS[kind])
    wide = copy.deepcopy(model)
    wide.load_state_dict(model.bfloat16().state_dict())
    for layer in converted_layers(model).values():
        layer.float()
    ids = torch.randint(99, (2, 16), generator=torch.Generator().manual_seed(1))
    ways, logits = {"both": model, "forward": model, "wide": wide}, {}
    for way, each in ways.items():
        cache, logits[way] = constant_cache(each), []
        for i, (at, n) in enumerate(((0, 5), (5, 1), (6, 1), (7, 4), (11, 1), (12, 4))):
            with fused_forward(each, "stored" if way == "both" and i % 2 == 0 else None):
                piece = each(ids[:, at : at + n], use_cache=True, **{CACHE: cache})
            logits[way].append(piece.logits.float())
    errors = [(torch.cat(logits[x], 1) - torch.cat(logits["wide"], 1)).abs().max() for x in ("both", "forward")]
    assert 0 < errors[0] <= 2 * errors[1]


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_forward(family, kind):
    """A prompt at once gives to the last bit what its tokens give one by one, and so does the state behind it."""
    model = converted(family, **KINDS[kind])
    ids = torch.randint(99, (2, 40), generator=torch.Generator().manual_seed(1))
    one_by_one, at_once, states = read(model, ids)
    expected = model(ids, use_cache=False).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(one_by_one, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(one_by_one, at_once)
    for x, y in zip(states[0].tensors().values(), states[1].tensors().values(), strict=True):
        assert torch.equal(x, y)


@torch.no_grad()
def test_forward_and_the_fused_step_take_turns_on_a_cache():
    """And a copy of the cache goes on by itself."""
    model = converted(**KINDS["heads of every mode"])
    ids = torch.randint(99, (2, 90), generator=torch.Generator().manual_seed(1))
    expected, cache, logits = model(ids, use_cache=False).logits, constant_cache(model), []
    for i, piece in enumerate(ids.split([9, 1, 1, 60, 1, 1, 17], dim=1)):
        with fused_forward(model, "float32" if i % 2 else None):
            logits.append(model(piece, **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_what_it_does_not_take_it_names():
    assert "slots must be 0" in refusal(converted(**NEAR, slots=3))
    model = model_of(FAMILIES["Llama"])
    assert refusal(model) is None, "softmax attention"
    model.set_attn_implementation("tarnn_hybrid")
    assert refusal(model).endswith("has no options (tarnn.conversion.set_options gives it some)")
    model = converted(**NEAR)
    model.model.rotary_emb.rope_type = "yarn"
    assert refusal(model).endswith("model.rotary_emb (LlamaRotaryEmbedding) has another rope_type than its config says")
    model = converted(**NEAR)
    model.model.layers[1].self_attn.scaling = 1.0
    assert refusal(model) == "model.layers.1.self_attn (LlamaAttention) has another scaling than its config says"
    model = converted(**NEAR)
    model.model.layers[1].self_attn.tarnn.options["window"] = 7
    assert refusal(model) == "model.layers.1.self_attn.tarnn (LayerAttention) has another options than its config says"
    assert refusal(converted("Gemma")).endswith("not for GemmaForCausalLM")


@torch.no_grad()
def test_a_converted_model_that_computes_softmax_again():
    model, ids = converted(**KINDS["heads of every mode"]), torch.arange(40)[None]
    before = model(ids).logits
    model.set_attn_implementation("sdpa")
    _, logits, _ = read(model, ids)
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, before, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "padded"), [("Qwen3.5", False), ("Qwen3.5", True), ("OLMo-hybrid", True), ("LFM2", True)]
)
def test_a_hybrid_model_takes_turns_on_a_cache(name, padded, tokens):
    """Linear layers of transformers and converted ones; pieces of a prompt and single tokens."""
    model = linear_model(name)
    ids, mask = TOKENS[:, :60], torch.ones_like(TOKENS[:, :60])
    if padded:
        mask[0, :4] = 0
    with tarnn.patch_transformers():
        model.set_attn_implementation("tarnn_hybrid")
        set_options(model, **KINDS["heads of every mode"])
        assert why_not_fused(model) is None
        one, other, at = constant_cache(model), constant_cache(model), 0
        for i, n in enumerate([9, 1, 1, 30, 1, 1, 17]):
            piece, at = ids[:, at : at + n], at + n
            options = {"attention_mask": mask[:, :at], "position_ids": mask[:, :at].cumsum(-1)[:, -n:] - 1}
            with fused_forward(model, None if i in (2, 4) else "float32"):
                found = model(piece, **{CACHE: one}, **options).logits
            expected = model(piece, **{CACHE: other}, **options).logits
            real = mask[:, at - n : at].bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
        assert tokens == [9, 1, 30, 1, 17]
        expected = generated(model, ids[:, :12], None)
        assert torch.equal(generated(model, ids[:, :12], "float32"), expected)
        assert tokens[5:] == [12, *[1] * 19]


def test_new_options_and_weights_count_from_the_next_text_on(tokens):
    model, ids, texts = converted(**KINDS["clusters"]), TOKENS[:, :30], []
    with fused_forward(model):
        for change in (
            lambda: None,
            lambda: set_options(model, window=3, sinks=0),
            lambda: model.lm_head.weight.data.neg_(),
        ):
            change()
            texts.append(model.generate(ids, max_new_tokens=12, do_sample=False))
            with fused_forward(model, None):
                assert torch.equal(texts[-1], model.generate(ids, max_new_tokens=12, do_sample=False))
    assert tokens == [30, *[1] * 11] * 3
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])


def test_a_model_is_opened_in_its_type():
    """Refused, where there is no step, with the reason."""
    model = converted()
    assert open_step(model).weights == "float32"
    assert open_step(model.bfloat16()).weights == "bfloat16"
    assert open_step(model, "int8").weights == "int8"
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UserError, match=r"can't be run by tarnn: model.layers.0.mlp.act_fn \(GELU\)"):
        open_step(model)
