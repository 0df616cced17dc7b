"""`tarnn info` says what is so: its figures are those of the model when it is loaded and run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tarnn.huggingface.config import softmax_twin
from tarnn.kernels import contract
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig
from tarnn.ops import backends
from tarnn.tasks.checkpoint import open_model


def facts_of(command, folder, *options):
    outcome = command("info", folder, "--json", *options)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


@pytest.mark.parametrize("kind", ["linear", "softmax", "hybrid", "learned"])
def test_figures_are_those_of_the_loaded_model(command, checkpoints, kind):
    facts, model = facts_of(command, checkpoints[kind], "--lengths", "7,40"), open_model(checkpoints[kind])
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["weight_bytes"] == sum(p.nbytes for p in model.parameters())
    assert facts["dtype"] == "float32"
    assert [row["length"] for row in facts["memory"]] == [7, 40]
    for row in facts["memory"]:
        _, state = model.prefill(
            torch.zeros(1, row["length"], dtype=torch.long), model.new_state(1, capacity=row["length"])
        )
        assert row["state_bytes"] == state.nbytes
        assert row["total_bytes"] == row["state_bytes"] + facts["weight_bytes"]


def test_the_rival_is_the_same_model_with_softmax(command, checkpoints):
    mine, baseline = (facts_of(command, checkpoints[kind], "--lengths", "999") for kind in ("linear", "softmax"))
    assert mine["memory"][0]["softmax_state_bytes"] == baseline["memory"][0]["state_bytes"] == 2 * 2 * 32 * 4 * 999
    assert mine["memory"][0]["softmax_total_bytes"] == baseline["memory"][0]["total_bytes"]
    config = TarnnConfig(num_hidden_layers=4, attention=["none", "linear"], feature_map="dpfp", normalize=False)
    assert softmax_twin(config).attention == ["none", "softmax"] * 2


def test_models_of_images(command, tmp_path):
    config = TarnnImageConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        image_height=4,
        image_width=5,
        num_channels=3,
        num_classes=7,
        num_mixtures=3,
    )
    model = TarnnForImageGeneration(config)
    model.save_pretrained(tmp_path)
    facts = facts_of(command, tmp_path)
    assert facts["parameters"] == model.num_parameters()
    (row,) = facts["memory"]
    assert row["length"] == 60
    assert row["state_bytes"] == model.new_state(1, class_labels=torch.tensor([0])).nbytes
    assert row["softmax_state_bytes"] == 2 * 2 * 32 * 4 * 60
    text = command("info", tmp_path, "--lengths", 9).out
    assert "images      4 × 5, 3 channels, 7 classes; logistic mixture of 3" in text
    assert "positions   grid, at most 60" in text


def test_layers_are_told_by_kind(command, checkpoints):
    assert facts_of(command, checkpoints["hybrid"])["layers"] == [
        {"layer": 0, "attention": "linear", "feature_map": "elu", "features": 8, "state_bytes": 4 * 4 * (8 * 8 + 8)},
        {"layer": 1, "attention": "softmax", "state_bytes_per_token": 2 * 32 * 4},
    ]
    text = command("info", checkpoints["hybrid"]).out
    assert "layer 0     linear, elu, 8 features per head, state 1,152 bytes" in text
    assert "layer 1     softmax, cache 256 bytes per token" in text
    assert "layer 0–1   linear" in command("info", checkpoints["linear"]).out


def test_random_features_are_told_and_their_draws_are_bytes(command, checkpoints):
    facts, text = facts_of(command, checkpoints["random"]), command("info", checkpoints["random"]).out
    assert facts["layers"][0]["random"]
    assert (facts["dtype"], facts["parameters"]) == ("float32", facts_of(command, checkpoints["linear"])["parameters"])
    assert "linear, favor, 24 random features per head, state" in text
    assert 'map options  {"favor": {"num_features": 24}}' in text
    state = 4 * 4 * (24 * 8 + 24) + 4 * 4  # S and z of four heads, and M
    assert facts["layers"][0]["state_bytes"] == state
    draws = 2 * (24 * 8 * 4 + 2 * 8)  # ω, and seed and number, of two layers
    assert facts["weight_bytes"] == 4 * facts["parameters"] + draws


def test_the_text_says_dtype_kernel_and_limits(command, checkpoints, tmp_path):
    TarnnForCausalLM.from_pretrained(checkpoints["linear"], dtype=torch.bfloat16).save_pretrained(tmp_path)
    text = command("info", tmp_path).out
    assert "in bfloat16" in text
    full, half = (facts_of(command, f, "--lengths", "9") for f in (checkpoints["linear"], tmp_path))
    assert half["weight_bytes"] == full["weight_bytes"] // 2
    assert half["memory"][0]["softmax_state_bytes"] == full["memory"][0]["softmax_state_bytes"] // 2
    assert half["memory"][0]["state_bytes"] == full["memory"][0]["state_bytes"]  # sums stay in float32
    assert "CPU kernel  {}: {}".format(*library.status()) in text
    assert full["no_fused_step"] is None or "the compiled kernels can't be used" in full["no_fused_step"]
    assert ("CPU step    fused" in text) == library.available()
    with library.disabled():
        assert "not fused: the compiled kernels can't be used" in command("info", tmp_path).out
    assert "any length" in text
    text = command("info", checkpoints["learned"], "--lengths", "48,49").out
    assert "at most 48" in text
    assert [line.endswith("(beyond its positions)") for line in text.splitlines()[-2:]] == [False, True]


def test_without_a_checkpoint_it_tells_what_it_runs_on(command):
    facts = json.loads(command("info", "--json").out)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads() == 1
    assert facts["cores"] >= 1
    assert facts["kernel"] == library.status()._asdict()
    assert facts["products_by"] == backends.products_by()
    if library.available():
        assert facts["products_by"].keys() == set(FORMATS)
        assert facts["products_by"]["int8"] in ("amx", "vpdpbusd", "pmaddwd", "usdot", "sdot", "smlal")
        assert facts["products_by"]["bfloat16"] in ("amx", "vdpbf16ps", "float32")
    text = command("info").out
    assert f"torch {torch.__version__}" in text
    assert facts["processor"] in text
    assert re.search(
        rf"packed weights .*int8 by {facts['products_by'].get('int8', '')}"
        if facts["products_by"]
        else "weights +none",
        text,
    )
    with library.disabled():
        text = command("info").out
    assert re.search("CPU kernel +PyTorch: switched off by", text)
    assert re.search("packed weights +none", text)
    assert command("info", "--lengths", "9").is_refusal("name one: `tarnn info CHECKPOINT")


def test_it_names_the_backend_of_every_op_and_the_reason_for_a_slow_one(command):
    records = Path(contract.__file__).parent.glob("*.py")
    ops = {path.stem for path in records if "\nclass Call(" in path.read_text()}
    assert ops == set(backends.choices())
    compiled = {op for op in ops if contract.named("cpu", op) is not None}
    facts = json.loads(command("info", "--json").out)["ops"]
    for op, choice in facts.items():
        assert choice["backend"] == ("cpu" if op in compiled and library.available() else "eager")
    with library.disabled():
        facts, lines = json.loads(command("info", "--json").out)["ops"], command("info").out.splitlines()
    compiled.remove("cross_entropy")  # in blocks of PyTorch's own products
    for op in ops:
        assert facts[op]["backend"] == ("cpu" if op == "cross_entropy" else "eager")
        assert any(line.startswith(f"op {op} ") and ("switched off by" in line) == (op in compiled) for line in lines)


def test_a_setting_of_the_kernels_that_nobody_knows(command, monkeypatch):
    monkeypatch.setattr(library, "_status", None)
    monkeypatch.setenv("TARNN_KERNELS", "of")
    assert command("info").is_refusal("TARNN_KERNELS is off or required", "got 'of'")


@pytest.mark.parametrize("lengths", ["", "0", "-3", "1,x", "1024,", "1.5"])
def test_lengths_that_are_none(command, checkpoints, lengths):
    assert command("info", checkpoints["linear"], f"--lengths={lengths}").is_refusal("--lengths", repr(lengths))


def test_what_is_no_checkpoint_of_ours(command, checkpoints, tmp_path):
    folder = tmp_path / "copy"
    assert command("info", folder).is_refusal(folder, "does not exist")
    shutil.copytree(checkpoints["linear"], folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[: len(whole) // 2])
    assert command("info", folder).is_refusal(weights, "cut short")
    weights.write_bytes(whole)
    config.write_text(text.replace('"intermediate_size": 96', '"intermediate_size": 64'))
    assert command("info", folder).is_refusal(weights, "mlp", "config calls for")
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert command("info", folder).is_refusal(weights, "lacks model.layers.2")
    config.write_text(text.replace('"norm_eps"', '"norm_epz"'))
    assert command("info", folder).is_refusal("norm_epz")
    config.write_text('{"model_type": "gpt2"}')
    assert command("info", folder).is_refusal("'gpt2'", "are not handled")
