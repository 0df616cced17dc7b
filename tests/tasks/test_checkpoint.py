"""A checkpoint opens, or one sentence says what is wrong with it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config

from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.errors import UserError
from tarnn.tasks.checkpoint import open_config, open_model
from tarnn.weight_files import read_header


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    from transformers.utils import logging

    from tarnn.models import TarnnConfig, TarnnForCausalLM

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    model = TarnnForCausalLM(TarnnConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "checkpoint")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_whole_checkpoint_opens(folder):
    model, tokenizer = open_model(folder), open_tokenizer(folder)
    assert not model.training
    assert model.dtype == torch.float32
    assert open_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert tokenizer.decode([67, 97]) == "Ca"
    saved, loaded = load_file(folder / "model.safetensors"), model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert read_header(folder / "model.safetensors")["model.embed_tokens.weight"] == ("F32", (257, 32))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rename_a_weight(folder):
    change_weights(folder, lambda t: t.update({"model.other.weight": t.pop("model.norm.weight")}))


def reshape_a_weight(folder):
    change_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(31)}))


WRONG = {
    "no such folder": (shutil.rmtree, "does not exist.*tarnn train"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no checkpoint.*--resume"),
    "config cut short": (lambda f: (f / "config.json").write_text('{"model_type": "ta'), "is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "must hold a JSON object; got \\[1\\]"),
    "an unknown key": (lambda f: change_config(f, hiden_size=3), "no 'hiden_size'; it takes.*hidden_size"),
    "config with a wrong value": (lambda f: change_config(f, norm="batch"), "norm must be one of rms, layer"),
    "BERT": (lambda f: BertConfig().save_pretrained(f), "another kind: 'bert', not 'tarnn'"),
    "GPT-2": (lambda f: GPT2Config().save_pretrained(f), "another kind: 'gpt2', not 'tarnn'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights.*model.safetensors"),
    "weights cut in half": (cut, "model.safetensors can't be read: it was cut short"),
    "weights are text": (lambda f: (f / "model.safetensors").write_text("word " * 99), "no safetensors file"),
    "a weight is missing": (rename_a_weight, "lacks model.norm.weight"),
    "a misshapen weight": (reshape_a_weight, r"model.norm.weight of shape \(31,\).*calls for \(32,\)"),
    "weights of a wider model": (lambda f: change_config(f, intermediate_size=64), "config calls for"),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_broken_checkpoint_is_told_in_a_sentence(folder, wrong):
    breaking, sentence = WRONG[wrong]
    breaking(folder)
    with pytest.raises(UserError, match=sentence) as error:
        open_model(folder)
    assert str(folder) in str(error.value)


def test_a_file_is_no_checkpoint(folder):
    with pytest.raises(UserError, match="is a file, not a checkpoint folder"):
        open_config(folder / "model.safetensors")


def test_a_missing_or_broken_tokenizer_is_told(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer in .* can't be read"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        open_tokenizer(folder)
