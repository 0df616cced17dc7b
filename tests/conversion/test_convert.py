"""Conversion: what the report says is what the op does, and what is saved is what was measured."""

import json
import warnings

import pytest
import torch
import transformers as hf
from support.families import FAMILIES, REFUSED, model_of

from tarnn.conversion import constant_cache, convert
from tarnn.conversion.capture import capturing
from tarnn.conversion.options import attention_layers, child_of
from tarnn.huggingface.versions import CACHE
from tarnn.ops.hybrid.op import hybrid_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs
SMALL = {"window": 6, "sinks": 2, "feature_map": {"name": "oprf", "num_features": 16}}


@pytest.fixture
def texts():
    torch.manual_seed(1)
    return torch.randint(3, 99, (5, 40))


def peaky(name):
    """Random weights large enough that heads attend to something."""
    made = model_of(FAMILIES[name])
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if any(x in key for x in ("q_proj", "k_proj", "query", "key")) and parameter.ndim == 2:
                parameter.mul_(12)
    return made


def call_of(model, row):
    """Each layer's q, k, v in a run with softmax attention."""
    seen = {}
    with torch.no_grad(), capturing(model, lambda i, x: seen.update({i: x})):
        model(input_ids=row)
    return seen


def error(o, right, heads):
    """Squared and relative."""
    return ((o - right)[:, heads].square().sum() / right[:, heads].square().sum()).item()


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_errors_and_shares_are_those_of_the_op(name, texts):
    model, row = peaky(name), texts[:1]
    report = convert(model, row, mode="features", **SMALL)
    compared = 0
    for layer in report.layers:
        seen, own = call_of(model, row)[layer.layer], child_of(attention_layers(model)[layer.layer])
        q, k, v = seen.q, seen.k, seen.v
        r = q.shape[1] // k.shape[1]
        near = {"causal": seen.causal, "window": 6, "sinks": 2}
        everything = hybrid_attention(q, k, v, **{**near, "window": 40})
        alone = hybrid_attention(q, k, v, **near)
        for j, head in enumerate(layer.heads):
            mine = slice(j * r, (j + 1) * r)
            assert head.error_window == pytest.approx(error(alone, everything, mine), rel=1e-3)
            if set(layer.modes) == {"features"}:
                phi, compared = own.feature_map, compared + 1
                o, rho = hybrid_attention(q, k, v, phi, far_bias=own.far_bias.detach(), return_far_share=True, **near)
                assert head.error_features == pytest.approx(error(o, everything, mine), rel=1e-3)
                assert head.far_share == pytest.approx(rho[:, mine].mean().item(), rel=1e-3)
    assert compared


def even(name="Llama"):
    """A model whose keys all weigh the same: one feature estimates them exactly."""
    made = model_of(FAMILIES[name])
    with torch.no_grad():
        for key, x in made.named_parameters():
            if "k_proj" in key:
                x.zero_()
    return made


CLUSTERS = {"window": 6, "sinks": 2, "feature_map": {"name": "clusters", "num_features": 4}}


def test_a_head_has_features_where_they_beat_both_windows(texts):
    report = convert(even(), texts, **CLUSTERS)
    assert {head.mode for layer in report.layers for head in layer.heads} == {"features"}
    assert report.hybrid == pytest.approx(report.softmax, abs=1e-5)
    assert f"in {len(report.layers) * 2} of {len(report.layers) * 2} heads" in report.advice


def test_a_head_has_no_features_where_their_bytes_are_better_spent_on_a_window(texts):
    """They beat the small window here, in some heads; never the one of equal bytes."""
    model = peaky("Llama")
    report = convert(model, texts, **{**SMALL, "feature_map": {"name": "oprf", "num_features": 40}})
    heads = [head for layer in report.layers for head in layer.heads]
    assert any(head.error_wide <= head.error_features < head.error_window for head in heads)
    assert {head.mode for head in heads} == {"window"}
    wide = report.wide_window
    assert wide == 6 + 40 * 4 * 9 // (16 * 4)
    advice = f"a window of {wide} would lose less in all heads: `--window {wide} --feature-map none`"
    assert report.advice == advice
    assert advice[1:] in report.page()
    loss = convert(peaky("Llama"), texts, window=wide, sinks=2, feature_map=None).hybrid
    assert report.wide_alone == pytest.approx(loss, abs=1e-6)


def test_no_features_at_all(texts, tmp_path):
    model = peaky("Llama")
    report = convert(model, texts, window=6, sinks=2, feature_map=None)
    assert report.hybrid == pytest.approx(report.window_alone, abs=1e-6)
    assert report.advice is None
    assert "| window | – | " in report.page()
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(texts).logits, loaded(texts).logits)
    assert not any("centres" in name for name, _ in loaded.named_parameters())


def test_features_end_where_their_calibration_did(texts):
    """Far behind the texts' length the model is its window and sinks alone; one warning says so."""
    model, alone = even(), even()
    convert(model, texts, mode="features", **CLUSTERS)
    convert(alone, texts, window=6, sinks=2, feature_map=None)
    torch.manual_seed(2)
    ids = torch.randint(3, 99, (2, 90))
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            within, there = model(ids[:, :40]).logits, alone(ids[:, :40]).logits
        assert not torch.allclose(within[:, 30:], there[:, 30:], atol=1e-4)
        with pytest.warns(UserWarning, match="calibrated on up to 40 tokens; beyond that"):
            found = model(ids).logits
        settled = 40 + 6 * len(attention_layers(model))  # no window reaches back before 40, through no layer
        assert settled < 80
        torch.testing.assert_close(found[:, settled:], alone(ids).logits[:, settled:], rtol=0, atol=1e-5)
        cache = constant_cache(model)
        with pytest.warns(UserWarning, match="calibrated on up to 40 tokens"):
            parts = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 38), (38, 39), (39, 41), (41, 90))]
        torch.testing.assert_close(torch.cat(parts, 1), found, rtol=0, atol=1e-4)


OUT_OF_RANGE = {
    "window": [-1, 0, 2.5, True],
    "sinks": [-1],
    "slots": [-2],
    "budget": [0],
    "exact_layers": [-1],
    "mode": ["some"],
}


@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_options_are_checked_before_any_row_is_run(texts, monkeypatch, option):
    model = peaky("Llama")
    monkeypatch.setattr(model, "forward", None)
    for value in OUT_OF_RANGE[option]:
        with pytest.raises(ValueError, match=option):
            convert(model, texts, **{**SMALL, option: value})


def test_what_is_loaded_is_what_was_converted(texts, tmp_path):
    model = peaky("Llama")
    report = convert(model, texts, exact_layers=1, **SMALL)
    model.save_pretrained(tmp_path)
    report.save(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(texts).logits, loaded(texts).logits)
    facts = json.loads((tmp_path / "conversion.json").read_text())
    assert [h["mode"] for x in facts["layers"] for h in x["heads"]].count("exact") == 2
    assert "Key/value heads" in (tmp_path / "conversion.md").read_text()


def test_all_layers_exact_lose_nothing_and_the_worst_go_first(texts):
    report = convert(peaky("Llama"), texts, exact_layers=2, **SMALL)
    assert report.hybrid == pytest.approx(report.softmax, rel=1e-5)
    report = convert(peaky("Llama"), texts, exact_layers=1, **SMALL)
    [exact] = [x for x in report.layers if set(x.modes) == {"exact"}]
    assert exact.harm == max(x.harm for x in report.layers)


def test_a_budget_is_kept_and_used(texts):
    least = convert(peaky("Llama"), texts, **SMALL)
    report = convert(peaky("Llama"), texts, budget=least.bytes + 3000, **SMALL)
    assert least.bytes < report.bytes <= least.bytes + 3000
    assert report.bytes < report.softmax_bytes
    with pytest.raises(ValueError, match=f"budget of {least.bytes - 1:,} bytes is too small"):
        convert(peaky("Llama"), texts, budget=least.bytes - 1, **SMALL)


SIZES = {"vocab_size": 99, "hidden_size": 32}


def bloom():
    return hf.BloomForCausalLM(hf.BloomConfig(n_layer=1, n_head=4, **SIZES))


def gemma_with_a_cap():
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(num_hidden_layers=1, num_attention_heads=4, head_dim=8, **SIZES))


REFUSED_MODELS = {
    "ALiBi": (bloom, "no attention interface"),
    "soft cap": (gemma_with_a_cap, "attn_logit_softcapping"),
    "biases by position": (
        lambda: hf.AutoModel.from_config(REFUSED["T5"][0]()).get_encoder(),
        "position_bias|no attention interface",
    ),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_cannot_be_converted(texts, name):
    build, word = REFUSED_MODELS[name]
    with pytest.raises(ValueError, match=word):
        convert(build(), texts, **SMALL)


def test_texts_that_say_nothing_are_refused(texts):
    with pytest.raises(ValueError, match=r"longer than window \+ sinks = 260 tokens.*got 40"):
        convert(peaky("Llama"), texts)
    with pytest.raises(ValueError, match="tokenizer"):
        convert(peaky("Llama"), ["words"], **SMALL)
