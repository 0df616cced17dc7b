"""Checkpoints of transformers: opened as transformers would where all is well, and refused in one sentence where not."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, model_of
from support.linear_families import linear_model
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tarnn.conversion.opening import open_pretrained
from tarnn.errors import UserError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("llama")
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(llama, tmp_path):
    """damaged(weights=…, config=…) → a copy whose tensors and config.json went through these functions."""

    def make(weights=lambda x: None, **config):
        folder = Path(shutil.copytree(llama, tmp_path / "copy", dirs_exist_ok=True))
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        fields = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return make


@pytest.mark.parametrize("name", [*FAMILIES, "Mamba-2", "Bamba", "Granite 4", "Qwen3.5"])  # three have an infinity
def test_opened_as_transformers_opens_it(name, tmp_path):
    model = model_of(FAMILIES[name]) if name in FAMILIES else linear_model(name)
    model.save_pretrained(tmp_path)
    ours, theirs = open_pretrained(tmp_path), type(model).from_pretrained(tmp_path).eval()
    assert type(ours) is type(theirs)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert not ours.training
    for find in (lambda x: x.state_dict(), lambda x: dict(x.named_buffers())):
        expected = find(theirs)
        assert find(ours).keys() == expected.keys()
        assert all(torch.equal(x, expected[key]) for key, x in find(ours).items())
    if theirs.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


UP = "model.layers.1.mlp.up_proj.weight"
SPOILED = {
    "lacks a weight": (lambda x: x.pop(UP), f"lacks {UP}"),
    "integers": (lambda x: x.update({UP: x[UP].int()}), f"{UP} as I32"),
    "NaN": (lambda x: x[UP].view(-1)[3:4].fill_(torch.nan), f"NaN or an infinity in {UP}"),
    "another shape": (lambda x: x.update({UP: x[UP][:, :5].clone()}), f"{UP} of shape \\(64, 5\\)"),
    "nothing": (dict.clear, "room for|calls for"),
}


@pytest.mark.parametrize("wrong", SPOILED)
def test_weights_are_those_of_the_config(damaged, wrong):
    damage, sentence = SPOILED[wrong]
    with pytest.raises(UserError, match=sentence):
        open_pretrained(damaged(damage))


def test_weights_that_nobody_needs_are_named(damaged):
    said = []
    open_pretrained(damaged(lambda x: x.update(junk=torch.ones(2))), report=said.append)
    assert ["does not use: junk" in line for line in said] == [True]


HUGE = [
    {"num_attention_heads": 10**9},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 4000},
    {"vocab_size": 10**12},
    {"hidden_size": 10**9},
    {"num_key_value_heads": 10**9},
    {"intermediate_size": 10**11},
    {"num_labels": 10**9},
    {"head_dim": 10**9},
    {"layer_types": ["full_attention"] * 3},
]


@pytest.mark.parametrize("sizes", HUGE, ids=str)
def test_sizes_are_held_against_the_weights_before_anything_is_built(damaged, sizes):
    folder = damaged(**sizes)
    with at_most_bytes(200 << 20), pytest.raises(UserError):
        open_pretrained(folder)


def at_most_bytes(number):
    """Fails where the peak of the process's memory grew by more than that."""
    import resource
    from contextlib import contextmanager

    @contextmanager
    def watched():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < number

    return watched()


def test_only_known_classes_are_made(damaged):
    """`architectures` is looked up among the classes that transformers has for such a config, and nowhere else."""
    kinds = {"LlamaModel": "LlamaModel", "Trainer": "LlamaModel", "BertModel": "LlamaModel", "os": "LlamaModel"}
    for name, expected in kinds.items():
        assert type(open_pretrained(damaged(architectures=[name]))).__name__ == expected
    for strange in (None, [], 7, [7], {}, [[]], "LlamaForCausalLM"):
        assert type(open_pretrained(damaged(architectures=strange))).__name__ == "LlamaModel"


def test_pickled_weights_are_not_read(damaged):
    folder = damaged()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a format that may hold code"):
        open_pretrained(folder)


def test_quantized_weights_are_refused(damaged):
    with pytest.raises(UserError, match=r"are quantized \('gptq'\)"):
        open_pretrained(damaged(quantization_config={"quant_method": "gptq", "bits": 4}))


def test_linear_layers_are_patched(tmp_path, monkeypatch):
    """transformers' own functions are not called, and a family that differs from what was tested is reported."""
    said = []
    linear_model("Qwen3.5").save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", refusing(qwen3_5.torch_chunk_gated_delta_rule))
        model = open_pretrained(tmp_path, report=said.append)
        model(input_ids=torch.arange(3, 40)[None], use_cache=False)
    assert said == []
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", lambda q, k: None)
    open_pretrained(tmp_path, report=said.append)
    assert ["tarnn was tested with" in x for x in said] == [True]


def refusing(function):
    """The function, with its arguments, that may not be called."""

    @functools.wraps(function)
    def refuse(*args, **kwargs):
        pytest.fail(f"{function.__name__} was called")

    return refuse
