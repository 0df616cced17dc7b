"""`tarnn eval`: what it measures is what a run measured, or what can be computed by hand; what can't be is one sentence."""

import json
import math
import random
import shlex
import shutil
import wave

import numpy as np
import pytest
import torch
from support.linear_families import FAMILIES, linear_model
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

from tarnn.cli.eval import confusion_lines
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.tasks.images import read_images

TINY = [
    "--hidden-size", "16", "--layers", "1", "--heads", "2", "--batch-size", "8", "--learning-rate", "0.02",
    "--steps", "6", "--eval-every", "3", "--save-every", "6",
]  # fmt: skip


@pytest.fixture
def sources(tmp_path):
    """By task: a small source of its kind."""
    draw = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("".join(draw.choice(["abcdef ", "ABCDEF "]) for _ in range(200)))
    labelled = tmp_path / "labelled.tsv"
    labelled.write_text("".join(f"{'up' if i % 3 else 'down'}\t{'AB' * (1 + i % 4)}\n" for i in range(40)))
    np.savez(tmp_path / "images.npz", images=np.random.default_rng(0).integers(0, 256, (30, 3, 3), np.uint8))
    return {
        "text": text,
        "masked-lm": text,
        "classification": labelled,
        "ctc": sounds(tmp_path),
        "image": tmp_path / "images.npz",
    }


def sounds(folder):
    for i in range(12):
        seconds = np.arange(3200) / 8000
        samples = (20000 * np.sin(2 * np.pi * (1500 if i % 2 else 300) * seconds)).astype(np.int16)
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
    (folder / "sounds.tsv").write_text("".join(f"{i}.wav\t{'A B' if i % 2 else 'b'}\n" for i in range(12)))
    return folder / "sounds.tsv"


def run_of(task, sources, command, folder, *options):
    windows = ["--context", "16"] if task in ("text", "masked-lm") else []
    more = {"text": ["--sample-tokens", 0], "image": ["--sample-images", 0]}.get(task, [])
    argv = ["train", sources[task], "--task", task, "--out", folder, *TINY, *windows, *more, *options]
    outcome = command(*argv)
    assert outcome.code == 0, outcome.err
    return outcome


def last_validation(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    best = min((x for x in lines if "validation_loss" in x), key=lambda x: x["validation_loss"])
    return {k.removeprefix("validation_"): v for k, v in best.items() if k.startswith("validation_")}


@pytest.mark.parametrize("task", ["text", "masked-lm", "classification", "ctc", "image"])
def test_of_a_run_it_finds_what_the_run_found(task, command, sources, tmp_path):
    run = tmp_path / "run"
    trained = run_of(task, sources, command, run)
    seen = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    found = command("eval", run, "--json")
    assert found.code == 0, found.err
    facts, expected = json.loads(found.out), last_validation(run)
    expected.pop("loss")
    if task not in ("text", "masked-lm"):
        expected.pop("perplexity")
    for name, value in expected.items():
        assert facts[name] == pytest.approx(value, rel=1e-5), name
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == seen  # nothing was written
    shown = command("eval", run)
    unit = next(name for name in facts if name.startswith("bits_per"))
    assert f"{unit.replace('_', ' ')}  {facts[unit]:.4f}" in shown.out
    for out in (trained.out, shown.out):  # what follows works as typed
        _, program, *argv = shlex.split(out.splitlines()[-1])
        assert program == "tarnn"
        assert command(*argv, *(["--num-samples", 1, "--out", tmp_path / "a.png"] if task == "image" else [])).code == 0
    assert command("eval", run, "--quiet").err == ""
    checkpoint = run / "checkpoints" / "checkpoint-6"
    if task != "ctc":  # whose front end lies in the run's folder alone
        assert json.loads(command("eval", checkpoint, "--json").out)["data"].count(str(tmp_path))


def test_weights_of_fewer_bits_are_those_of_the_fused_step(command, sources, tmp_path):
    run = tmp_path / "run"
    run_of("text", sources, command, run)
    outcomes = {x: command("eval", run, *x, "--json") for x in ((), ("--weights", "float32"), ("--weights", "int8"))}
    plain, wide, bytewise = (json.loads(x.out)["bits_per_byte"] for x in outcomes.values())
    assert wide == pytest.approx(plain, rel=1e-5)
    assert 1e-6 < abs(bytewise / plain - 1) < 0.05
    assert "fused step (int8 weights)" in outcomes["--weights", "int8"].err
    run_of("masked-lm", sources, command, tmp_path / "masked")
    outcome = command("eval", tmp_path / "masked", "--weights", "int8")
    assert outcome.is_refusal("--weights is for language models")


def test_a_confusion_table_and_accuracy(command, sources, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data.tsv"
    run_of("classification", sources, command, run)
    data.write_text("up\tABAB\ndown\tABAB\nup\tAB\n")
    facts = json.loads(command("eval", run, data, "--json").out)
    guesses = [command("predict", run, text).out.split("\t")[0] for text in ("ABAB", "ABAB", "AB")]
    table = np.zeros((2, 2), int)
    for true, guess in zip((1, 0, 1), guesses):
        table[true, ("down", "up").index(guess)] += 1
    assert facts["labels"] == ["down", "up"]
    assert facts["confusion"] == table.tolist()
    assert facts["accuracy"] == pytest.approx(table.trace() / 3)
    assert "what was predicted" in command("eval", run, data).out
    data.write_text("up\tABAB\nsideways\tAB\n")
    assert command("eval", run, data).is_refusal("line 2", "'sideways' is none of the classes")


def test_a_table_too_wide_for_a_terminal_is_its_mistakes():
    labels, table = [f"label {i}" for i in range(12)], np.eye(12, dtype=int)
    table[3, 4] = 7
    assert confusion_lines(labels, table.tolist()) == ["most frequent mistakes", "       7 × label 3 taken for label 4"]
    narrow = confusion_lines(labels[:3], table[:3, :3].tolist())
    assert [len(line) <= 80 for line in narrow] == [True] * 5


def test_errors_of_letters_and_words(command, sources, tmp_path):
    run = tmp_path / "run"
    run_of("ctc", sources, command, run, "--steps", 60)
    facts = json.loads(command("eval", run, sources["ctc"], "--json").out)
    written = [command("predict", run, tmp_path / f"{i}.wav").out.strip() for i in range(12)]
    wrong = [len({0: ["B"], 1: ["A", "B"]}[i % 2]) for i, text in enumerate(written)]
    exact = sum(text == ("A B" if i % 2 else "B") for i, text in enumerate(written))
    assert facts["words"] == sum(wrong) == 18
    assert (facts["word_error_rate"] == 0) == (exact == 12)
    assert (facts["letter_error_rate"] == 0) == (exact == 12)


def test_bits_per_dimension_with_their_error(command, sources, tmp_path):
    run = tmp_path / "run"
    run_of("image", sources, command, run)
    facts = json.loads(command("eval", run, sources["image"], "--json").out)
    pixels = torch.from_numpy(read_images(str(sources["image"])).pixels)
    bits = AutoModel.from_pretrained(run).eval().bits_per_dim(pixels)
    assert facts["bits_per_dim"] == pytest.approx(bits.mean().item(), rel=1e-5)
    assert facts["standard_error"] == pytest.approx(bits.std().item() / 30**0.5, rel=1e-4)


@pytest.fixture
def foreign(tmp_path):
    """A tiny softmax model of transformers with a tokenizer of bytes."""
    torch.manual_seed(0)
    folder = tmp_path / "foreign"
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=8, n_layer=1, n_head=2)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_of_transformers(command, foreign, tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes("Überall ist Wunderland.".encode() * 5)
    facts = json.loads(command("eval", foreign, text, "--context", 20, "--json").out)
    data = text.read_bytes()
    ids = torch.tensor([list(data)])
    model, nats = AutoModelForCausalLM.from_pretrained(foreign).double().eval(), 0.0
    with torch.no_grad():
        for i in range(0, len(data) - 1, 20):  # the last window ends with the text
            start = min(i, len(data) - 21)
            window = ids[:, start : start + 21]
            logs = model(window[:, :-1]).logits.log_softmax(-1)[0]
            nats -= logs[range(20), window[0, 1:]][i - start :].sum().item()
    assert facts["bits_per_byte"] == pytest.approx(nats / math.log(2) / (len(data) - 1), rel=1e-5)
    assert facts["perplexity"] == pytest.approx(math.exp(nats / (len(data) - 1)), rel=1e-5)
    assert facts["tokens"] == facts["bytes"] == len(data) - 1


def test_a_linear_model_of_transformers(command, tmp_path):
    """Nothing is proposed: no command but this one takes it."""
    folder, text = tmp_path / "qwen", tmp_path / "a.txt"
    config = FAMILIES["Qwen3.5"]()
    config.vocab_size = 257
    linear_model("Qwen3.5", config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    text.write_text("Wunderland")
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([list(b"Wunderland")])
    facts = json.loads(command("eval", folder, text, "--json").out)
    with torch.no_grad():
        nats = cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:]).item()
    assert facts["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-4)
    assert "next" not in facts
    outcome = command("eval", folder, text)
    assert (outcome.code, "next" in outcome.out) == (0, False)


def test_a_converted_model(command, foreign, tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "converted"
    text.write_text("Wunderland ist ueberall. " * 60)
    options = ("--window", 8, "--features", 4, "--num-texts", 4, "--length", 40)
    converted = command("convert", foreign, out, "--texts", text, *options)
    assert converted.code == 0, converted.err
    facts, before = (json.loads(command("eval", x, text, "--context", 40, "--json").out) for x in (out, foreign))
    assert facts["bits_per_byte"] != before["bits_per_byte"]  # its window was in use
    assert facts["bits_per_byte"] == pytest.approx(before["bits_per_byte"], rel=0.2)


def test_what_it_refuses(command, foreign, sources, tmp_path):
    run, bare = tmp_path / "run", tmp_path / "bare"
    run_of("text", sources, command, run)
    shutil.copytree(run, bare)
    (bare / "settings.json").unlink()
    none = tmp_path / "none"
    run_of("text", sources, command, none, "--val-fraction", 0)
    encoder = tmp_path / "encoder"
    config = LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    LlamaModel(config).save_pretrained(encoder)
    byte_tokenizer().save_pretrained(encoder)
    text, latin = sources["text"], tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for arguments, words in [
        ((tmp_path / "gone",), ["gone does not exist", "tarnn train TEXT"]),
        ((bare,), ["holds no settings.json", f"`tarnn eval {bare} DATA`"]),
        ((none,), ["held nothing out", f"`tarnn eval {none} DATA`"]),
        ((run, tmp_path / "gone.txt"), ["gone.txt: no such file"]),
        ((run, text, "--label-field", "x"), ["--label-field does not go with a model of text"]),
        ((run, text, "--context", 0), ["--context"]),
        ((foreign,), ["held data out", f"`tarnn eval {foreign} TEXT`"]),
        ((foreign, text, "--context", 65), ["--context 65 is longer than this model's context; expected 64"]),
        ((foreign, text, "--label-field", "x"), ["--label-field does not go with"]),
        ((foreign, latin), ["latin.txt is not UTF-8"]),
        ((encoder, text), ["holds a LlamaModel", "causal language models"]),
        ((run, "--device", "nonsense"), ["--device nonsense"]),
    ]:
        assert command("eval", *arguments).is_refusal(*words) or arguments
    assert command("eval", bare, text).code == 0
    sources["text"].write_text("gone")
    assert command("eval", run).code == 0  # a run of text keeps what it held out
    (run / "data" / "corpus.json").unlink()
    assert command("eval", run).is_refusal("is gone")


def test_a_model_of_bytes_needs_no_tokenizer(command, tmp_path):
    config = TarnnConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    TarnnForCausalLM(config).save_pretrained(tmp_path / "bytes")
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    found = command("eval", tmp_path / "bytes", tmp_path / "a.txt", "--json")
    assert json.loads(found.out)["bits_per_byte"] > 7


def test_data_that_have_changed_are_not_held_out(command, sources, tmp_path):
    run = tmp_path / "run"
    run_of("classification", sources, command, run)
    with sources["classification"].open("a") as file:
        file.write("up\tABABABAB\n" * 10)
    assert command("eval", run).is_refusal("no longer hold what the run", "Name the data")
