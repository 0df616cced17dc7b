"""Conversion: what the report says is what the op does, and what is saved is what was measured."""

import json

import pytest
import torch
import transformers as hf
from support.families import FAMILIES, REFUSED, model_of

from tarnn.conversion import convert
from tarnn.conversion.options import attention_layers, child_of
from tarnn.conversion.watching import watching
from tarnn.ops.hybrid import hybrid_attention

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
    with torch.no_grad(), watching(model, lambda i, x: seen.update({i: x})):
        model(input_ids=row)
    return seen


def error(o, right, heads):
    """Squared and relative."""
    return ((o - right)[:, heads].square().sum() / right[:, heads].square().sum()).item()


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_errors_and_shares_are_those_of_the_op(name, texts):
    model, row = peaky(name), texts[:1]
    report = convert(model, row, **SMALL)
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
                o, rho = hybrid_attention(
                    q, k, v, phi, far_bias=own.far_bias.detach(), return_far_share=True, **near
                )
                assert head.error_features == pytest.approx(error(o, everything, mine), rel=1e-3)
                assert head.far_share == pytest.approx(rho[:, mine].mean().item(), rel=1e-3)
    assert compared


def test_a_head_has_features_only_where_they_lower_its_error(texts):
    for layer in convert(peaky("Llama"), texts, **SMALL).layers:
        for head in layer.heads:
            better = "features" if head.error_features < head.error_window else "window"
            assert head.mode == better


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


def test_refused(texts):
    with pytest.raises(ValueError, match=r"longer than window \+ sinks = 260 tokens.*has 40"):
        convert(peaky("Llama"), texts)
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="no attention interface"):
        convert(bloom, texts, **SMALL)
    t5 = hf.AutoModel.from_config(REFUSED["T5"][0]()).get_encoder()
    with pytest.raises(ValueError, match=r"position_bias|no attention interface"):
        convert(t5, texts, **SMALL)
    with pytest.raises(ValueError, match="tokenizer"):
        convert(peaky("Llama"), ["words"], **SMALL)
