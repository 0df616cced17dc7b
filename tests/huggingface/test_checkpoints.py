"""Saving and loading, the Auto classes, tied weights, new vocabularies, and how weights start."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnModel


@torch.no_grad()
def test_a_saved_model_is_the_same_function(model, ids, tmp_path):
    x = ids(2, 6)
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TarnnForCausalLM
    assert not loaded.training
    assert torch.equal(loaded(x).logits, model(x).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is TarnnModel
    torch.testing.assert_close(model.lm_head(body(x).last_hidden_state), model(x).logits)


def test_another_dtype(make_model, ids, tmp_path):
    """Positions are computed, not stored, so low precision does not spoil them."""
    make_model("normed").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    rotation = model.model.layer_options(torch.tensor([[100_003]]))[0]["rotation"]
    exact = torch.tensor(100_003.0, dtype=torch.float64).cos()
    assert rotation.cos[0, 0, 0, 0].item() == pytest.approx(exact.item(), abs=1e-6)


def test_tied_weights_are_one(make_model, tmp_path):
    model = make_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = TarnnForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "paper"])
@pytest.mark.parametrize("size", [45, 20])
def test_resize_the_vocabulary(make_model, ids, tmp_path, kind, size):
    model, x = make_model(kind), ids(1, 5) % 20
    before = model(x).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    kept = min(size, 37)
    assert model.config.vocab_size == size
    assert model(x).logits.shape[-1] == size
    torch.testing.assert_close(model(x).logits[..., :kept], before[..., :kept])
    model.save_pretrained(tmp_path)
    again = TarnnForCausalLM.from_pretrained(tmp_path)
    for name, saved in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], saved), name
    # where a matrix lies in memory decides how its product is summed
    torch.testing.assert_close(again(x).logits, model(x).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [TarnnForCausalLM, TarnnConfig])
@pytest.mark.parametrize("name", ["runs/nothing", "./nothing", "a/b/c", "{tmp}/nothing"])
def test_a_folder_that_is_missing(tmp_path, monkeypatch, kind, name):
    """The hub is not asked for what looks like a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*(nothing|a/b/c)"):
        kind.from_pretrained(name.format(tmp=tmp_path))


def test_weights_that_a_checkpoint_lacks_start_fresh(make_model, tmp_path, caplog):
    """A plain checkpoint loaded with decays and a learned map: those begin as in a new model."""
    make_model("linear").float().save_pretrained(tmp_path)
    for decay in ("token", "head"):
        model = TarnnForCausalLM.from_pretrained(tmp_path, decay=decay, feature_map="hedgehog")
        attention = model.model.layers[0].attention
        decays = attention.decay(torch.zeros(1, 1, 32)).flatten().exp().tolist()
        assert decays == pytest.approx([1 - 2.0 ** (-5 - g) for g in range(4)])
        assert torch.equal(attention.feature_map.weight[1], torch.eye(8))
