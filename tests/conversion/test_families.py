"""Models of transformers run our attention by name; with a window over everything they compute what they did."""

from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, REFUSED, inputs_of, model_of

from tarnn.conversion import constant_cache, set_options
from tarnn.huggingface.versions import CACHE

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs


@torch.no_grad()
def outputs(model, given):
    """The first output at real tokens."""
    out, mask = model(**given)[0], given.get("attention_mask")
    return out if mask is None else out[mask.bool()]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_over_everything_changes_nothing(name):
    family = FAMILIES[name]
    model = model_of(family)
    for given in inputs_of(family.kind).values():
        model.set_attn_implementation("sdpa")
        expected = outputs(model, given)
        model.set_attn_implementation("tarnn_hybrid")
        set_options(model, window=1000, sinks=2, feature_map="favor")
        torch.testing.assert_close(outputs(model, given), expected, atol=3e-6, rtol=1e-5)
        set_options(model, window=2, sinks=1)
        assert not torch.allclose(outputs(model, given), expected, atol=3e-6), "our attention was never called"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name):
    config, words = REFUSED[name]
    family = FAMILIES["BART" if name == "T5" else "ViT"]._replace(config=config)
    model = model_of(family)
    model.set_attn_implementation("tarnn_hybrid")
    with pytest.raises(ValueError, match=words):
        model(**inputs_of(family.kind)["whole"])


def test_attention_weights_are_refused():
    model = model_of(FAMILIES["BERT"], "tarnn_hybrid")
    with pytest.raises(ValueError, match="attention"):
        model(**inputs_of("encoder")["whole"], output_attentions=True)


def test_dropout_of_attention_weights_is_refused():
    model = model_of(FAMILIES["BERT"], "tarnn_hybrid").train()  # BERT's default drops a tenth
    with pytest.raises(ValueError, match="attention_dropout"):
        model(**inputs_of("encoder")["whole"])


def test_packed_rows_of_a_batch():
    model = model_of(FAMILIES["Llama"], "tarnn_hybrid")
    set_options(model, window=3, sinks=1, feature_map="favor")
    ids = inputs_of("decoder")["whole"]["input_ids"]
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part).logits for part in ids.split([15, 25], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_one_row_with_padding_on_the_left_is_no_packed_row(cached):
    """Its positions stand still before they begin, too, but a mask says that it is padding."""
    model = model_of(FAMILIES["Llama"], "tarnn_hybrid")
    set_options(model, window=3, sinks=1, feature_map="favor")
    ids = inputs_of("decoder")["whole"]["input_ids"][:1]
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = constant_cache(model) if cached else None
    with torch.no_grad():
        padded = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, use_cache=cached
        ).logits
        alone = model(input_ids=ids[:, 9:]).logits
    torch.testing.assert_close(padded[:, 9:], alone, atol=1e-5, rtol=1e-5)


def test_the_table_in_the_docs_is_up_to_date():
    import runpy

    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "families_table.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["page"]()
