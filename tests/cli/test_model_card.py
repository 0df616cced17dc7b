"""The README.md beside a model: the hub reads its head, its lines of Python run, and nobody's words are overwritten."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from tarnn import models
from tarnn.training.folder import clear
from tarnn.training.model_card import CARD, hub_name, is_unchanged, page, write_card

SMALL = ("--num-texts", "4", "--length", "64", "--window", "8", "--sinks", "2")
WITHOUT_TARNN = """
import sys, transformers
for folder in sys.argv[1:]:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        print("attention:", model.config._attn_implementation)
    except ValueError as error:
        print(error)
"""


def run_block(path, text, monkeypatch):
    """Run the Python of a card where its folder lies; return the names that it makes."""
    (block,) = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    monkeypatch.chdir(path.parent)
    names = {}
    exec(block, names)
    return names


def test_a_run_has_a_card(train, text, tmp_path, monkeypatch):
    code, out, err = train("--steps", 3, "--context", 32)
    assert code == 0, err
    path = tmp_path / "run" / CARD
    card = ModelCard.load(path)
    head = card.data.to_dict()
    assert head == {"library_name": "tarnn", "pipeline_tag": "text-generation", "tags": ["tarnn", "linear-attention"]}
    size = (path.parent / "model.safetensors").stat().st_size
    model = run_block(path.parent, card.text, monkeypatch)["model"]
    for words in (
        "# run\n",
        f"{model.num_parameters():,} parameters",
        f"{size:,} bytes, float32",
        "text.txt: ",
        "3 steps in ",
        re.search(r"[\d.]+ bits/byte on the validation text \(step \d\)", out)[0],
        "Its examples had 32 tokens",
        "`tarnn generate run …`",
        "does not recognize the model type `tarnn`",
    ):
        assert words in card.text, words
    assert str(tmp_path) not in card.text
    assert "stopped" not in card.text
    assert is_unchanged(path)


def test_a_card_is_written_anew_while_nobody_changed_it(train, tmp_path):
    train("--steps", 2)
    path = tmp_path / "run" / CARD
    first = path.read_text()
    assert train("--steps", 4, "--resume")[0] == 0
    assert "4 steps in" in path.read_text() != first
    for changed in ("My own words.\n", first.replace("# run", "# Books"), first + "\nMore.\n", ""):
        path.write_text(changed)
        assert not is_unchanged(path)
        write_card(path.parent, "other")
        clear(path.parent)
        assert path.read_text() == changed
    path.write_bytes(b"\xff\xfe")
    assert not is_unchanged(path)
    path.write_text(first)
    clear(path.parent)
    assert not path.exists()


def test_a_converted_model_and_a_trained_one_have_cards(tarnn, llama, text, tmp_path, monkeypatch):
    shutil.copytree(llama, base := tmp_path / "models--someone--llama" / "snapshots" / "0")
    converted, trained = tmp_path / "converted", tmp_path / "trained"
    options = (text, "--num-texts", "4", "--length", "64")
    assert tarnn("convert", base, converted, "--texts", text, *SMALL, "--feature-map", "hedgehog")[0] == 0
    finetuned = (
        "finetune",
        "--against-softmax",
        converted,
        "--out",
        trained,
        *options,
        "--steps",
        "1",
        "--batch-size",
        "1",
    )
    assert tarnn(*finetuned)[0] == 0
    for path, words in ((converted, "replaced by `tarnn convert`"), (trained, "trained by `tarnn finetune`")):
        card = ModelCard.load(path / CARD)
        assert words in card.text
        assert "text.txt: " in card.text
        assert f"{(path / 'model.safetensors').stat().st_size:,} bytes, float32" in card.text
        assert str(tmp_path) not in card.text
        assert re.search(r"[\d.]+ [Nn]ats per token; [\d.]+ (with softmax|before) \([+-][\d.]+\)\.", card.text)
        assert card.data.library_name == "tarnn"
        assert run_block(path, card.text, monkeypatch)["model"].config.quantization_config is not None
    assert ModelCard.load(converted / CARD).data.base_model == "someone/llama"
    (trained / CARD).write_text("Mine.\n")
    assert tarnn(*finetuned, "--resume")[0] == 0
    assert (trained / CARD).read_text() == "Mine.\n"


@pytest.mark.parametrize("name", ["TarnnForImageGeneration", "TarnnForMaskedLM", "TarnnForCTC"])
def test_each_kind_of_model_is_loaded_by_its_card(name, tmp_path, monkeypatch):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "TarnnForImageGeneration": lambda: models.TarnnImageConfig(image_height=4, image_width=4, **size),
        "TarnnForMaskedLM": lambda: models.TarnnConfig(vocab_size=5, causal=False, **size),
        "TarnnForCTC": lambda: models.TarnnConfig(vocab_size=5, pad_token_id=0, input_size=4, causal=False, **size),
    }[name]()
    model = getattr(models, name)(config)
    model.save_pretrained(tmp_path / "m")
    text = page(
        tmp_path / "m",
        "m",
        model,
        "A model.",
        base=None,
        tags=(),
        sources=("datasets:owner/texts:train", "a.txt"),
        rows={"a": "b | c"},
        measures="none",
        limits=(),
        command="tarnn predict",
    )
    write_card(tmp_path / "m", text)
    card = ModelCard.load(tmp_path / "m" / CARD)
    assert card.data.datasets == ["owner/texts"]
    assert "license" not in card.data.to_dict()
    assert type(run_block(tmp_path / "m", text, monkeypatch)["model"]) is type(model)


def test_what_transformers_says_without_tarnn_is_what_the_cards_say(tarnn, train, llama, text, tmp_path):
    assert train("--steps", 1)[0] == 0
    converted = tmp_path / "converted"
    assert tarnn("convert", llama, converted, "--texts", text, *SMALL)[0] == 0
    command = [sys.executable, "-c", WITHOUT_TARNN, tmp_path / "run", converted]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert "model type `tarnn` but Transformers does not recognize this architecture" in done.stdout
    assert "Unknown quantization type, got tarnn" in done.stderr + done.stdout


def test_the_name_of_a_folder_in_the_cache_of_the_hub(tmp_path):
    assert hub_name(tmp_path / "models--Qwen--Qwen3.5-0.8B" / "snapshots" / "abc") == "Qwen/Qwen3.5-0.8B"
    assert hub_name(tmp_path / "qwen") is None
