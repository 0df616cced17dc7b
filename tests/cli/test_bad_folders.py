"""A folder that a program can't be made of, by each command that runs models: one sentence that names it, and nothing left."""

import json
import shutil

import pytest
import torch
from support.damages import cut, index, removes, sets, terabyte, weights, writes
from support.open_folders import make_folder

import tarnn
from tarnn.decoding import memory
from tarnn.errors import UserError
from tarnn.kernels.cpu import library

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def quantised(method):
    damage = sets("config.json", quantization_config={"quant_method": method, "bits": 4})
    return damage, [f"quantised ({method})", "Take the model's folder in float32"]


def spelled(text, key="rms_norm_eps"):
    """Write a number as it should not stand there."""

    def damage(folder):
        config = json.loads((folder / "config.json").read_text()) | {key: "HERE"}
        (folder / "config.json").write_text(json.dumps(config).replace('"HERE"', text))

    return damage


def half_written(folder):
    """Two shards, of which the second is not there yet."""
    index({"weight_map": {UP: "a.safetensors", GATE: "model-00002-of-00002.safetensors"}})(folder)


def code_of_its_own(folder):
    sets("config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})(folder)
    (folder / "modeling_own.py").write_text("raise SystemExit('run')")


def sentencepiece(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")


# what is done to a folder, and words of the sentence
CASES = {
    "an unknown architecture": (sets("config.json", model_type="rwkv6"), ["'rwkv6' are not handled", "lara_mini, lfm2,"]),
    "an architecture that is no text": (sets("config.json", model_type=["llama"]), ["model_type must be a text"]),
    "an unknown option": (sets("config.json", logit_scale=2.0), ["logit_scale = 2.0 is not known", "config.json"]),
    "an unknown activation": (sets("config.json", hidden_act="gelu_new"), ["hidden_act must be 'silu'", "gelu_new"]),
    "an unknown rotation": (
        sets("config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        ["'yarn' are not handled", "expected default"],
    ),
    "a weight is missing": (weights(lambda x: x.pop(UP)), [f"lacks the weights {UP}"]),
    "a weight of another shape": (
        weights(lambda x: x.update({UP: x[UP][:, :3].clone()})),
        [f"{UP} of shape (48, 3)", "calls for (48, 32)"],
    ),
    "superfluous weights": (
        weights(lambda x: x.update({f"model.more.{i:02}": torch.ones(1) for i in range(12)})),
        ["model.more.00, ", "model.more.09 and 2 more"],
    ),
    "a weight that is not finite": (weights(lambda x: x[UP].view(-1)[5:6].fill_(torch.nan)), [UP, "NaN"]),
    "half-written shards": (half_written, ["model-00002-of-00002.safetensors"]),
    "a shard that was cut": (cut("model.safetensors"), ["model.safetensors", "cut short"]),
    "a terabyte that is not there": (terabyte, []),  # it may be mapped, or not
    "NaN": (spelled("NaN"), ["rms_norm_eps must be a finite number"]),
    "Infinity": (spelled("-Infinity"), ["rms_norm_eps must be a finite number"]),
    "1e999": (spelled("1e999"), ["rms_norm_eps must be a finite number"]),
    "transformers' infinity": (spelled('{"__float__": "Infinity"}'), ["rms_norm_eps must be a finite number"]),
    "transformers' NaN": (spelled('{"__float__": "NaN"}'), ["rms_norm_eps must be a finite number"]),
    "a number of many digits": (spelled("1" * 5000, "hidden_size"), ["config.json is not JSON"]),
    "a key twice": (spelled('1e-6, "rms_norm_eps": 1e-5'), ["'rms_norm_eps' stands twice"]),
    "10⁹ heads": (
        sets("config.json", num_attention_heads=10**9, num_key_value_heads=10**9),
        ["num_attention_heads must be a whole number from 1 to 65,536"],
    ),
    "10⁹ layers": (sets("config.json", num_hidden_layers=10**9), ["num_hidden_layers must be a whole number"]),
    "10¹² words": (sets("config.json", vocab_size=10**12), ["vocab_size must be a whole number"]),
    "more layers than weights": (sets("config.json", num_hidden_layers=60_000, layer_types=None), ["lacks the weights model.la"]),
    "a sentencepiece model alone": (sentencepiece, ["tokenizer as tokenizer.model", "expected tokenizer.json"]),
    "no tokenizer": (removes("tokenizer.json"), ["holds no tokenizer"]),
    "code of its own": (code_of_its_own, ["wants code of its own (auto_map)", "never run"]),
    "ends beyond the vocabulary": (sets("generation_config.json", eos_token_id=10**9), ["must be a token below 264"]),
    "a hot temperature": (sets("generation_config.json", temperature="hot", do_sample=True), ["temperature must be"]),
    "not UTF-8": (writes("config.json", b'{"model_type": "\xff"}'), ["config.json is not JSON"]),
    **{f"quantised by {x}": quantised(x) for x in ("gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors")},
}  # fmt: skip
COMMANDS = {
    "generate": ["--prompt", "a", "--state-out", "OUT"],
    "info": [],
    "pack": ["OUT"],
    "serve": ["--port", 0, "--state-dir", "OUT"],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("good") / "tiny", "Llama")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_refused(command, good, tmp_path, case, name):
    damage, words = CASES[case]
    if name == "info" and "tokenizer" in "".join(words):
        pytest.skip("info looks at no tokenizer")
    folder = shutil.copytree(good, tmp_path / "copy")
    damage(folder)
    options = [tmp_path / "out" if x == "OUT" else x for x in COMMANDS[name]]
    assert command(name, folder, *options).is_refusal(folder, *words)
    assert [x.name for x in tmp_path.iterdir()] == ["copy"]


def test_the_undamaged_folder_runs(command, good, tmp_path):
    assert command("generate", good, "--prompt", "a", "--max-new-tokens", 2, "--state-out", tmp_path / "s").code == 0
    assert command("info", good).code == 0
    assert command("pack", good, tmp_path / "x.tarnn").code == (0 if library.available() else 2)


def test_states_and_packed_files_of_others(command, good, tmp_path):
    """Of another model, format or version; a state that is a folder's weights; and a packed file that was cut."""
    other, state, packed = make_folder(tmp_path / "other", "Qwen3"), tmp_path / "s", tmp_path / "x.tarnn"
    assert command("generate", other, "--prompt", "a", "--max-new-tokens", 1, "--state-out", state).code == 0
    line = ("generate", good, "--max-new-tokens", 1, "--state-in")
    assert command(*line, state).is_refusal(state, "saved by another model")
    assert command(*line, good / "model.safetensors").is_refusal("model.safetensors")
    if not library.available():
        return
    assert command("pack", good, packed, "--weights", "int8").code == 0
    assert command("generate", packed, "--weights", "int4", "--prompt", "a").is_refusal("holds int8 weights", "as int4")
    assert command("generate", packed, "--state-in", state, "--max-new-tokens", 1).is_refusal("another model")
    whole = packed.read_bytes()
    packed.write_bytes(whole.replace(b'"format_version": "2"', b'"format_version": "7"'))
    assert command("info", packed).is_refusal("has version '7' of packed files", "Pack its folder again")
    packed.write_bytes(whole[: len(whole) // 2])
    assert command("info", packed).is_refusal("cut short")


def test_memory_that_there_is_not(command, good, tmp_path, monkeypatch):
    """Keys and values of all tokens, and packed weights, are refused before any are made."""
    folder = shutil.copytree(good, tmp_path / "endless")
    sets("config.json", max_position_embeddings=2**24)(folder)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**8)
    for rows, most in ((1, 10**6), (1000, 1000)):
        line = ("--prompt", "a", "--max-new-tokens", most, "--num-samples", rows)
        outcome = command("generate", folder, *line)
        assert outcome.is_refusal(f"{most + 1:,} tokens take 0.3 GB of memory, and 0.1 GB are left", "less at once")
    with pytest.raises(UserError, match=r"the states of 1,000,001 tokens take 0\.3 GB"):
        tarnn.load(folder).generate("a", max_new_tokens=10**6)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**5)
    for name, *options in (["generate", "--prompt", "a"], ["pack", tmp_path / "x"], ["info", "--weights", "float32"]):
        says = "weights as float32 take 0.0 GB of memory", "Keep them as bfloat16"
        assert command(name, folder, *options).is_refusal(*says)
    assert command("info", folder, "--weights", "int8").code == (0 if library.available() else 2)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 7 << 20),
        ({"memory.max": "max\n", "memory.current": "5"}, 7 << 20),
        ({"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 1\nfile 300\n"}, 4300),
    ],
)
def test_what_is_left_is_what_system_and_group_leave(tmp_path, group, expected):
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:    {7 << 10} kB\n")
    for name, text in group.items():
        (tmp_path / name).write_text(text)
    assert memory.available_bytes(tmp_path / "meminfo", tmp_path) == expected
    assert memory.available_bytes(tmp_path / "none", tmp_path / "none") is None
