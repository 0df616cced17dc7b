"""What `patch_transformers` replaces, for how long, and what it refuses."""

import logging
import types
from pathlib import Path

import pytest
import torch
import transformers
from support.linear_families import FAMILIES, KEPT, TOKENS, linear_model, whole
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import tarnn
from tarnn.huggingface.patching import families, patch as patching
from tarnn.huggingface.versions import CACHE, cache_of

pytestmark = pytest.mark.filterwarnings("ignore")
CHUNKS = "torch_chunk_gated_delta_rule"
LAYER = qwen.Qwen3NextGatedDeltaNet


@pytest.fixture
def originals():
    """What stands in Qwen3-Next's file; afterwards it must stand there again."""
    before = {CHUNKS: getattr(qwen, CHUNKS), "forward": LAYER.forward}
    yield types.SimpleNamespace(chunks=before[CHUNKS], forward=before["forward"])
    tarnn.unpatch_transformers()
    assert {CHUNKS: getattr(qwen, CHUNKS), "forward": LAYER.forward} == before


@pytest.fixture(scope="module")
def models():
    return linear_model("Qwen3-Next"), linear_model("Qwen3-Next")


def test_for_a_while(originals):
    with tarnn.patch_transformers() as patch:
        assert getattr(qwen, CHUNKS) is not originals.chunks
        assert LAYER.forward is not originals.forward
    assert getattr(qwen, CHUNKS) is originals.chunks
    assert LAYER.forward is originals.forward
    assert set(patch.replaced) == {family.name for family in families.FAMILIES} - KEPT
    assert CHUNKS in patch.replaced["Qwen3-Next"]
    assert set(patch.kept) == KEPT


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_within_blocks_in_any_order(originals, first):
    patches = [tarnn.patch_transformers(), tarnn.patch_transformers()]
    replaced = getattr(qwen, CHUNKS)
    patches[first].__exit__()
    assert getattr(qwen, CHUNKS) is replaced is not originals.chunks
    patches[1 - first].__exit__()
    assert getattr(qwen, CHUNKS) is originals.chunks


@torch.no_grad()
def test_one_model_alone(originals, models):
    patched, other = models
    expected = whole(other)
    with tarnn.patch_transformers(patched) as patch:
        assert list(patch.replaced) == ["Qwen3-Next"]
        assert not torch.equal(whole(patched), expected)
        torch.testing.assert_close(whole(patched), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(whole(other), expected)
        assert getattr(qwen, CHUNKS) is originals.chunks
        with tarnn.patch_transformers(patched):
            pass
        assert not torch.equal(whole(patched), expected)
    assert torch.equal(whole(patched), expected)
    assert all("forward" not in vars(layer) for layer in patched.modules())
    tarnn.patch_transformers(patched)
    tarnn.unpatch_transformers(patched)
    assert torch.equal(whole(patched), expected)


def test_a_model_that_is_gone_leaves_nothing(originals):
    import gc
    import weakref

    model = linear_model("Qwen3-Next")
    tarnn.patch_transformers(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_family_with_other_arguments_stays_as_it_is_as_a_whole(originals, monkeypatch, models, caplog):
    def changed(query, key, value, g, beta, scale):
        raise AssertionError

    monkeypatch.setattr(qwen, "torch_recurrent_gated_delta_rule", changed)
    with caplog.at_level(logging.WARNING, "tarnn"), tarnn.patch_transformers() as patch:
        assert qwen.torch_recurrent_gated_delta_rule is changed
        assert getattr(qwen, CHUNKS) is originals.chunks
        assert LAYER.forward is originals.forward
    why = (
        f"torch_recurrent_gated_delta_rule of transformers {transformers.__version__} has new arguments (scale) and lacks some "
        "(initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs); tarnn was tested with transformers >=5.23"
    )
    assert patch.kept["Qwen3-Next"].startswith(why)
    assert f"Qwen3-Next is not: {why}" in caplog.text
    assert "Qwen3.5" in patch.replaced
    with pytest.raises(ValueError, match="stays as it is: torch_recurrent_gated_delta_rule of transformers"):
        tarnn.patch_transformers(models[0])


def test_families_that_are_missing_are_named(originals, monkeypatch):
    monkeypatch.delattr(qwen, CHUNKS)
    lost = families.Family("Lost", "lost", ())
    monkeypatch.setattr(patching, "FAMILIES", (*families.FAMILIES[:2], lost))
    with tarnn.patch_transformers() as patch:
        assert f"has no qwen3_next.{CHUNKS}" in patch.kept["Qwen3-Next"]
        assert "can't load it" in patch.kept["Lost"]
        assert list(patch.replaced) == ["Qwen3.5"]
    monkeypatch.undo()


def test_unknown_models_are_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM has no layer that tarnn computes\. Known families: Qwen3-Next"
    ):
        tarnn.patch_transformers(model)
    with pytest.raises(TypeError, match="got str"):
        tarnn.patch_transformers("qwen")


def test_a_layer_with_a_forward_of_its_own_is_refused(models):
    layer = next(x for x in models[0].modules() if type(x) is LAYER)
    layer.forward = layer.forward
    try:
        with pytest.raises(ValueError, match="has a forward of its own already"):
            tarnn.patch_transformers(models[0])
    finally:
        del layer.forward


def test_every_known_family_is_tested():
    assert {family.name for family in families.FAMILIES} == set(FAMILIES) | KEPT
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES | dict.fromkeys(KEPT))} families](docs/families.md)" in readme


@pytest.mark.compile
@pytest.mark.thorough
def test_compiled_models(originals, models):
    model, compiled = models[0], torch.compile(models[0], backend="aot_eager")
    with pytest.raises(ValueError, match="compiled already"):
        tarnn.patch_transformers(compiled)
    x = TOKENS[:, :8]
    with torch.no_grad():
        theirs = whole(compiled, x)  # compiled before: patched functions are other functions, so it is compiled again
        with tarnn.patch_transformers():
            ours = whole(model, x)
            torch.testing.assert_close(whole(compiled, x), ours)
            assert not torch.equal(ours, theirs)
        torch.testing.assert_close(whole(compiled, x), theirs)


def test_gaps_in_a_row_that_continues_a_recording_are_refused(originals, models):
    model = models[0]
    with tarnn.patch_transformers(), torch.no_grad():
        cache = cache_of(model(input_ids=TOKENS[:, :5], use_cache=True))
        cache.activate_past_recording()
        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[1, 5:7] = 0
        with pytest.raises(ValueError, match="padding among their new tokens while it records"):
            model(input_ids=TOKENS[:, 5:9], **{CACHE: cache}, attention_mask=mask)


def test_packed_rows_with_a_cache_are_refused(originals, models):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with tarnn.patch_transformers(), pytest.raises(ValueError, match="use_cache=False"):
        models[0](input_ids=TOKENS[:1, :5], position_ids=positions, use_cache=True)
