"""Whatever became of a checkpoint's files: `info` and `generate` work, or say in one sentence what is wrong."""

import json
import random
import shutil

import pytest
import torch
from support.damages import a_folder, index, removes, weights

JSONS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
BYTES = {
    "empty": lambda whole: b"",
    "cut short": lambda whole: whole[: len(whole) // 2],
    "garbage": lambda whole: random.Random(0).randbytes(300),
    "nested deeply": lambda whole: b'{"a":' + b"[" * 100_000,
    "a list": lambda whole: b"[1, 2]",
    "a number": lambda whole: b"7",
    "null": lambda whole: b"null",
    "a huge number": lambda whole: b'{"model_type": ' + b"9" * 5000 + b"}",
    "not UTF-8": lambda whole: b'{"model_type": "\xff\xfe"}',
}
VALUES = {
    "config.json": [
        {"model_type": ["tarnn"]}, {"model_type": None}, {"dtype": 3}, {"dtype": "float33"}, {"dtype": "int8"},
        {"architectures": 7}, {"hidden_size": 10**8}, {"hidden_size": 10**40}, {"num_hidden_layers": 10**9},
        {"vocab_size": 10**15}, {"vocab_size": "many"}, {"feature_map": {"elu": 1}}, {"feature_map_options": [1]},
        {"feature_map": "favor", "feature_map_options": {"favor": {"num_features": 10**9}}},
        {"max_position_embeddings": 10**30}, {"position": "learned", "max_position_embeddings": 10**12},
        {"eos_token_id": "x"}, {"eos_token_id": 10**20}, {"attention": [[]]}, {"id2label": 3}, {"label2id": [1]},
        {"quantization_config": {"quant_method": "bitsandbytes"}}, {"attn_implementation": "someone/kernels"},
        {"num_attention_heads": 0}, {"norm_eps": "1"}, {"tie_word_embeddings": 1}, {"transformers_version": 5},
        {"use_cache": "no"}, {"problem_type": 1}, {"output_hidden_states": "yes"}, {"return_dict": 1},
        {"chunk_size_feed_forward": "x"}, {"is_encoder_decoder": 3},
    ],
    "generation_config.json": [
        {"eos_token_id": "x"}, {"eos_token_id": -1}, {"eos_token_id": [1, None]}, {"eos_token_id": 10**30},
        {"eos_token_id": {}}, {"temperature": "hot"}, {"max_length": -1}, {"bos_token_id": "x"},
    ],
    "tokenizer_config.json": [
        {"tokenizer_class": "BertTokenizer"}, {"tokenizer_class": 7}, {"eos_token": 7}, {"eos_token": {"content": []}},
        {"eos_token": "<nowhere>"}, {"auto_map": 3}, {"added_tokens_decoder": 7}, {"model_max_length": "x"},
    ],
    "tokenizer.json": [{"model": 3}, {"model": {"type": "BPE"}}, {"added_tokens": 7}, {"decoder": {"type": "none"}}],
}  # fmt: skip


def poison(value):
    return weights(lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[7:8].fill_(value))


def integers(tensors):
    tensors.update({name: x.to(torch.int64) for name, x in tensors.items()})


def one_integer(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()


WEIGHTS = {
    "NaN": (poison(float("nan")), "NaN or an infinity in model.layers.0.mlp.up_proj.weight"),
    "an infinity": (poison(-float("inf")), "NaN or an infinity in model.layers.0.mlp.up_proj.weight"),
    "no tensors": (weights(dict.clear), "holds no floating-point weights"),
    "integers only": (weights(integers), "holds no floating-point weights"),
    "one of integers": (weights(one_integer), "model.norm.weight as I32 where the model needs floating-point"),
    "no file": (removes("model.safetensors"), "holds no weights"),
    "a folder": (a_folder("model.safetensors"), "holds no weights"),
    **{f"file: {name}": (lambda f, change=change: (f / "model.safetensors").write_bytes(
        change((f / "model.safetensors").read_bytes())), "can't be read") for name, change in BYTES.items()},
    **{f"index: {found!r:.30}": (index(found), "must hold") for found in (
        [1], 7, {}, {"weight_map": 3}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a.safetensors"]},
        {"weight_map": {"a": "../../etc/passwd"}}, {"weight_map": {"a": None}})},
    "index: no such file": (index({"weight_map": {"a": "b.safetensors"}}), "can't be read"),
}  # fmt: skip


@pytest.fixture
def outcomes(command, checkpoints, tmp_path):
    """outcomes(damage, commands) → those of the commands on a copy of a good checkpoint that was damaged."""
    options = {"info": (), "generate": ("--prompt", "x", "--max-new-tokens", 2, "--quiet")}

    def run(damage, commands=tuple(options)):
        folder = shutil.copytree(checkpoints["single"], tmp_path / "copy")
        damage(folder)
        found = [command(name, folder, *options[name]) for name in commands]
        for outcome in found:
            assert outcome.code == 0 or outcome.is_refusal(folder)
            assert outcome.code == 2 or not outcome.err
        shutil.rmtree(folder)
        return found

    return run


@pytest.mark.parametrize("name", JSONS)
@pytest.mark.parametrize("change", list(BYTES))
def test_a_json_file_that_is_none(outcomes, name, change):
    *_, generate = outcomes(lambda f: (f / name).write_bytes(BYTES[change]((f / name).read_bytes())))
    assert generate.code == 2


@pytest.mark.parametrize("name", JSONS)
@pytest.mark.parametrize("wrong", ["no file", "a folder"])
def test_a_json_file_that_is_missing(outcomes, name, wrong):
    def damage(folder):
        (folder / name).unlink()
        if wrong == "a folder":
            (folder / name).mkdir()

    *_, generate = outcomes(damage)
    assert generate.code == (0 if name == "generation_config.json" else 2)


@pytest.mark.parametrize(("name", "changes"), [(n, c) for n in VALUES for c in VALUES[n]], ids=lambda x: f"{x!r:.50}")
def test_a_value_that_is_wrong_or_strange(outcomes, name, changes):
    def damage(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    outcomes(damage, ("info", "generate") if name == "config.json" else ("generate",))


def test_a_key_that_is_missing(outcomes, checkpoints):
    found = json.loads((checkpoints["single"] / "config.json").read_text())
    for key in found:
        less = {k: v for k, v in found.items() if k != key}
        outcomes(lambda f, less=less: (f / "config.json").write_text(json.dumps(less)), ("generate",))


@pytest.mark.parametrize("wrong", list(WEIGHTS))
def test_weights_that_are_damaged(outcomes, wrong):
    damage, sentence = WEIGHTS[wrong]
    for outcome in outcomes(damage):
        assert outcome.is_refusal(sentence)


def test_bits_at_random(outcomes):
    """A flipped bit in any file: another number or a sentence, and never a traceback."""
    for seed in range(30):
        drawn = random.Random(seed)

        def flip(folder, drawn=drawn):
            file = folder / drawn.choice(["model.safetensors", *JSONS])
            data = bytearray(file.read_bytes())
            data[drawn.randrange(min(len(data), 3000))] ^= 1 << drawn.randrange(8)
            file.write_bytes(data)

        outcomes(flip, ("generate",))
