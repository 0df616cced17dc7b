"""`tarnn show`: files about the attention of a checkpoint, ours or transformers', and what it refuses."""

import json

import numpy as np
import pytest
import transformers as hf

from tarnn.data.tokenizers import amino_tokenizer, byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForConditionalGeneration, TarnnForMaskedLM, TarnnSeq2SeqConfig


def test_a_model_of_ours(command, checkpoints, tmp_path):
    done = command("show", checkpoints["hybrid"], "--input", "a cat.", "--out", tmp_path / "seen")
    assert (done.code, done.out) == (0, f"{tmp_path / 'seen' / 'attention.html'}\n"), done.err
    arrays = np.load(tmp_path / "seen" / "attention.npz")
    assert arrays["tokens"].tolist() == ["a", "␣", "c", "a", "t", "."]
    assert arrays["layers.1.attention"].shape == (4, 6, 6)
    assert not np.triu(arrays["layers.0.attention"], 1).any()
    assert {x.name for x in (tmp_path / "seen").iterdir()} == {
        "attention.html",
        "attention.npz",
        "layer-0.png",
        "layer-1.png",
    }


def test_a_protein_and_a_model_that_sees_both_sides(command, tmp_path):
    tokenizer = amino_tokenizer()
    config = TarnnConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, causal=False
    )
    TarnnForMaskedLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "p.fasta").write_text(">one\nMKV\n>two x\nACDEFGH\n")
    options = ("--input", tmp_path / "p.fasta", "--out", tmp_path / "seen", "--max-tokens", 5)
    done = command("show", tmp_path / "model", *options, "--record", 2)
    assert done.code == 0
    assert "two x, 7 residues" in done.err
    assert "7 tokens; the first 5" in done.err
    arrays = np.load(tmp_path / "seen" / "attention.npz")
    assert arrays["tokens"].tolist() == [*"ACDEF"]
    assert np.triu(arrays["layers.0.attention"], 1).any()
    assert command("show", tmp_path / "model", *options, "--record", 3).is_refusal("holds 2 sequences")


def test_a_model_of_transformers(command, tmp_path):
    config = hf.LlamaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    seen = {}
    for attention in ("sdpa", "tarnn_hybrid", "tarnn_linear"):
        out = tmp_path / attention
        done = command("show", tmp_path / "model", "--input", "hat", "--out", out, "--attention", attention)
        assert done.code == 0
        seen[attention] = np.load(out / "attention.npz")["layers.1.self_attn"]
    np.testing.assert_allclose(seen["sdpa"], seen["tarnn_hybrid"], atol=2e-3)
    assert seen["tarnn_linear"].shape == (4, 3, 3)


@pytest.mark.parametrize("damage", ["nothing", "config", "weights", "tokenizer"])
def test_what_can_not_be_opened(command, checkpoints, tmp_path, damage):
    model = tmp_path / "model"
    if damage != "nothing":
        model.mkdir()
        for file in checkpoints["linear"].iterdir():
            (model / file.name).write_bytes(file.read_bytes())
    if damage == "config":
        (model / "config.json").write_text(json.dumps({"model_type": "no_such_kind"}))
    if damage == "weights":
        (model / "model.safetensors").write_bytes(b"junk")
    if damage == "tokenizer":
        (model / "tokenizer.json").write_text("{")
    assert command("show", model, "--input", "x", "--out", tmp_path / "o").is_refusal(model)
    assert not (tmp_path / "o").exists()


def test_more_than_one_text_is_refused(command, tmp_path):
    config = TarnnSeq2SeqConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    TarnnForConditionalGeneration(config).save_pretrained(tmp_path / "pairs")
    done = command("show", tmp_path / "pairs", "--input", "x", "--out", tmp_path / "o")
    assert done.is_refusal("an encoder with a decoder", "tarnn.analysis.attention_maps")


def test_inputs_that_are_refused(command, checkpoints, tmp_path):
    def refusal(*options):
        return command("show", checkpoints["linear"], "--out", tmp_path / "o", *options).is_refusal

    assert refusal("--input", "")("--input is empty")
    assert refusal("--input", "x", "--attention", "eager")("--attention is sdpa or")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    assert refusal("--input", tmp_path / "bad.txt")("not text in UTF-8")
    (tmp_path / "bad.fa").write_text(">x\nM*\n")
    assert refusal("--input", tmp_path / "bad.fa")("line 2: '*'")
