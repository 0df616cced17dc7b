"""Masked text and labelled texts: trained, resumed and used from the command line; what can't be is one sentence."""

import gzip
import json
import random
import re
import wave

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, pipeline

from tarnn.cli.main import main
from tarnn.data.pairs import read_pairs
from tarnn.errors import UserError
from tarnn.tasks.text.windows import Masking

TINY = [
    "--hidden-size", "16", "--layers", "1", "--heads", "2", "--batch-size", "8", "--learning-rate", "0.02",
    "--eval-every", "20", "--save-every", "20",
]  # fmt: skip
TASKS = ("masked-lm", "classification", "ctc")


@pytest.fixture
def tarnn(capsys):
    """tarnn(*argv) → (exit code, stdout, stderr), in this process."""

    def run(*argv):
        code = main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def sources(tmp_path):
    """By task: texts in which a model finds something at once."""
    words = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("".join(words.choice(["abcdef ", "ABCDEF "]) for _ in range(400)))
    labelled = tmp_path / "labelled.tsv.gz"
    lines = [f"{'up' if i % 2 else 'down'}\tmore\t{'AB' * (3 + i % 4) if i % 2 else 'ab' * 5}" for i in range(60)]
    labelled.write_bytes(gzip.compress("\n".join(lines).encode()))
    return {"masked-lm": text, "classification": labelled, "ctc": sounds(tmp_path)}


def sounds(folder):
    """High and low tones, called A and B."""
    lines = []
    for i in range(24):
        seconds = np.arange(1600 + 200 * (i % 3)) / 8000
        samples = (20000 * np.sin(2 * np.pi * (1500 if i % 2 else 300) * seconds)).astype(np.int16)
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(samples.tobytes())
        lines.append(f"{i}.wav\t{'A' if i % 2 else 'b'}\n")
    (folder / "sounds.tsv").write_text("".join(lines))
    return folder / "sounds.tsv"


def options(task):
    return [*TINY, "--task", task, *(["--context", "24"] if task == "masked-lm" else [])]


def log_of(run):
    """Without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("task", TASKS)
def test_it_learns_and_goes_on_as_if_never_stopped(task, tarnn, sources, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    constant = ["--set", "lr_scheduler_type=constant", "--set", "warmup_steps=0", *options(task)]
    code, out, err = tarnn("train", sources[task], "--out", whole, *constant, "--steps", 40)
    assert code == 0, err
    lines = log_of(whole)
    measured = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert measured[-1] < measured[0]
    rate = "letter_error_rate" if task == "ctc" else "accuracy"
    assert f"{rate.replace('_', ' ')} {lines[-1][f'validation_{rate}']:.4f}" in err + out
    assert f"tarnn predict {whole}" in out
    for more in (["--steps", 20], ["--steps", 40, "--resume"]):
        assert tarnn("train", sources[task], "--out", parts, *constant, *more)[0] == 0
    assert log_of(parts) == log_of(whole)


def test_all_targets_of_a_step_weigh_the_same_however_its_batches_are_cut(tarnn, sources, tmp_path):
    lines, task = {}, "masked-lm"
    for batch, accumulate in ((8, 1), (2, 4)):
        out, cut = tmp_path / f"{batch}", ["--batch-size", batch, "--accumulate", accumulate]
        code, _, err = tarnn("train", sources[task], "--out", out, *options(task), *cut, "--steps", 10)
        assert code == 0, err
        lines[batch] = [line[name] for line in log_of(out) for name in ("loss", "grad_norm") if name in line]
    assert lines[2] == pytest.approx(lines[8], rel=1e-4)


def test_labels_by_the_command_and_by_the_pipeline(tarnn, sources, tmp_path):
    run = tmp_path / "run"
    tarnn("train", sources["classification"], "--out", run, *options("classification"), "--steps", 40)
    texts = tmp_path / "texts"
    texts.write_text("ababab\n\nABABAB\n")
    code, out, _ = tarnn("predict", run, texts, "abab", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(x["input"], x["output"]) for x in rows] == [("ababab", "down"), ("ABABAB", "up"), ("abab", "down")]
    assert sum(rows[0]["probabilities"].values()) == pytest.approx(1)
    code, out, err = tarnn("predict", run, "abab", "ABAB")
    assert [line.partition(" ")[0] for line in out.splitlines()] == ["down\tdown", "up\tup"]
    assert err.count("likeliest labels with their probabilities") == 1
    assert "likeliest" not in tarnn("predict", run, "abab", "--json")[2]
    loaded = pipeline("text-classification", model=str(run))
    assert [x["label"] for x in loaded(["ababab", "ABABAB"])] == ["down", "up"]
    model = AutoModelForSequenceClassification.from_pretrained(run)
    assert model.config.id2label == {0: "down", 1: "up"}
    assert not model.config.causal


def test_an_empty_file_is_no_input(tarnn, sources, tmp_path):
    tarnn("train", sources["classification"], "--out", tmp_path / "run", *options("classification"), "--steps", 1)
    (tmp_path / "none.txt").write_text("\n")
    code, out, err = tarnn("predict", tmp_path / "run", "AB", tmp_path / "none.txt")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert err.endswith("none.txt' is empty; expected a text, or a file with one on each line.\n")


def test_masks_are_filled(tarnn, sources, tmp_path):
    run = tmp_path / "run"
    tarnn("train", sources["masked-lm"], "--out", run, *options("masked-lm"), "--steps", 60)
    code, out, _ = tarnn("predict", run, "abc<|mask|>ef ABC<|mask|>EF", "--json", "--top", 2)
    row = json.loads(out)
    assert code == 0
    assert [len(guesses) for guesses in row["masks"]] == [2, 2]
    assert row["output"] == "abc{}ef ABC{}EF".format(*(guesses[0]["token"] for guesses in row["masks"]))
    code, _, err = tarnn("predict", run, "abc")
    assert code == 2
    assert "has no mask; write <|mask|>" in err
    code, _, err = tarnn("generate", run, "--prompt", "abc")
    assert code == 2
    assert "`tarnn predict` takes it" in err


def test_sounds_become_letters(tarnn, sources, tmp_path):
    run = tmp_path / "run"
    # which learns from 22 tones, at this rate
    classic = ["--subsampling", 3, "--decay", "none", "--position", "sinusoidal"]
    rate = ["--learning-rate", 0.01, "--steps", 80]
    code, out, err = tarnn("train", sources["ctc"], "--out", run, *options("ctc"), *classic, *rate)
    assert code == 0, err
    code, out, err = tarnn("predict", run, tmp_path / "1.wav", tmp_path / "0.wav")
    assert (code, out.split()) == (0, ["A", "B"]), err
    assert tarnn("transcribe", run, tmp_path / "1.wav")[1].strip() == "A"
    for line, message in (
        ("0.wav\tÄ\n", "bad.tsv, line 1: the transcript has 'Ä'"),
        ("none.wav\tA\n", "bad.tsv, line 1: .*none.wav"),
        (f"0.wav\t{'AB' * 30}\n", "bad.tsv, line 1: .* has 9 places for 60 letters"),
    ):
        (tmp_path / "bad.tsv").write_text(line)
        code, _, err = tarnn(
            "train", tmp_path / "bad.tsv", "--out", tmp_path / "bad", *options("ctc"), "--val-fraction", 0
        )
        assert code == 2
        assert re.search(message, err.splitlines()[-1])


def test_masking_is_what_it_says():
    masking = Masking(0.3, mask_id=50, num_ids=51, special=frozenset({49, 50}), seed=0)
    ids = np.random.default_rng(0).integers(0, 49, 20_000)
    ids[::10] = 49
    read, labels = masking(ids, 1, 2)
    chosen = labels != -100
    assert not chosen[::10].any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (read[~chosen] == ids[~chosen]).all()
    assert chosen.sum() / 18_000 == pytest.approx(0.3, abs=0.02)
    assert (read[chosen] == 50).mean() == pytest.approx(0.8, abs=0.02)
    assert (read[chosen] == ids[chosen]).mean() == pytest.approx(0.1 + 0.1 / 49, abs=0.02)
    assert not np.isin(read[chosen & (read != 50)], [49]).any()
    again, other = masking(ids, 1, 2), masking(ids, 2, 2)
    assert (again[0] == read).all()
    assert (other[0] != read).any()
    assert (Masking(1e-9, 50, 51, frozenset({49, 50}), 0)(ids[:5])[1] != -100).sum() == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("up\tx\n\nno tab here\n", "bad.tsv, line 3 has no tab; expected the label and the text"),
        ("up\tx\n\t y\n", "bad.tsv, line 2: the label is empty"),
        ("up\t\n", "bad.tsv, line 1: the text is empty"),
        ("", "bad.tsv is empty"),
        ("up\tx\nup\ty\n", "have the label 'up'; a classifier needs two or more"),
    ],
)
def test_files_that_can_not_be(content, message, tarnn, tmp_path):
    (tmp_path / "bad.tsv").write_text(content)
    code, _, err = tarnn("train", tmp_path / "bad.tsv", "--out", tmp_path / "run", *options("classification"))
    assert code == 2
    assert message in err.splitlines()[-1]


def test_more_that_can_not_be(tarnn, sources, tmp_path):
    def refused(*argv, source=sources["classification"], task="classification"):
        code, _, err = tarnn("train", source, "--out", tmp_path / "run", *options(task), *argv)
        assert code == 2, err
        assert "Traceback" not in err
        return err.splitlines()[-1]

    (tmp_path / "val.tsv").write_text("up\tAB\nsideways\tAB\n")
    assert "line 2: the label 'sideways' is none of the classes" in refused("--val", tmp_path / "val.tsv")
    assert "--max-length is for --task classification" in refused(
        "--max-length", 3, source=sources["masked-lm"], task="masked-lm"
    )
    assert "--context is for --task text" in refused("--context", 3)
    config = tmp_path / "config.json"
    config.write_text('{"causal": true}')
    assert "causal is True in" in refused("--config", config, source=sources["masked-lm"], task="masked-lm")


def test_pairs_of_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "b": "x"}\n{"a": "two", "b": "y"}\n')
    assert [x[:2] for x in read_pairs([str(path)], "a", "b")] == [("1", "x"), ("two", "y")]
    for line, message in (
        ("[1]", "holds a JSON list"),
        ('{"a": 1}', "has no field 'b', only 'a'\\."),
        ('{"a": 1, "b": [2]}', "has a list where the text was expected, in the field 'b'"),
        ("{", "is not JSON"),
    ):
        path.write_text(line)
        with pytest.raises(UserError, match=rf"rows.jsonl, line 1 {message}"):
            list(read_pairs([str(path)], "a", "b"))


def test_other_columns_are_named_with_the_options_that_take_them(tarnn, tmp_path):
    task, options = "classification", ("--label-field", "--text-field")
    path = tmp_path / "rows.csv"
    path.write_text("topic,sentence\n" + "a,x\nb,y\n" * 20)
    arguments = ["train", path, "--task", task, "--out", tmp_path / "run", *TINY, "--steps", 1]
    for option, field, name in zip(options, ("label", "text"), ("topic", "sentence"), strict=True):
        code, _, err = tarnn(*arguments)
        assert (code, f"line 2 has no field {field!r}, only 'topic', 'sentence'; name" in err) == (2, True)
        assert f"name the right one with {option}." in err
        arguments += [option, name]
    code, _, err = tarnn(*arguments)
    assert code == 0, err


def test_predict_reads_files_as_train_does(tarnn, sources, tmp_path):
    run = tmp_path / "run"
    tarnn("train", sources["classification"], "--out", run, *options("classification"), "--steps", 1)
    tables = {"a.jsonl": '{"n": 1, "text": "AB ab"}\n', "a.csv": 'n,text\n1,"AB ab"\n', "a.tsv": "up\tmore\tAB ab\n"}
    for name, content in {**tables, "a.txt": "AB ab\n"}.items():
        (tmp_path / name).write_text(content)
        code, out, err = tarnn("predict", run, tmp_path / name, "--json")
        assert (code, json.loads(out)["input"]) == (0, "AB ab"), (name, err)
        assert "no file" not in err
    (tmp_path / "a.jsonl").write_text('{"body": "AB"}\n')
    code, _, err = tarnn("predict", run, tmp_path / "a.jsonl")
    assert code == 2
    assert "a.jsonl, line 1 has no field 'text', only 'body'" in err
    assert "--text-field" in err
    assert tarnn("predict", run, tmp_path / "a.jsonl", "--text-field", "body")[0] == 0


@pytest.mark.parametrize("text", ["nosuchfile.txt", "folder/file", "my notes.jsonl", "x.wav"])
def test_what_looks_like_a_file_that_is_not_there(text, tarnn, sources, tmp_path):
    run = tmp_path / "run"
    tarnn("train", sources["classification"], "--out", run, *options("classification"), "--steps", 1)
    code, out, err = tarnn("predict", run, text, "A fine film.", "and/or so")
    assert (code, len(out.splitlines())) == (0, 3)
    assert err.splitlines()[0] == f"tarnn: there is no file {text}; it is taken as a text"


@pytest.mark.parametrize("task", TASKS)
def test_validating_on_what_is_trained_on(task, tarnn, sources, tmp_path):
    argv = ("train", sources[task], "--out", tmp_path / "run", *options(task), "--steps", 1)
    code, _, err = tarnn(*argv, "--val", sources[task])
    assert code == 2
    assert re.search(r"all (rows|documents) of --val .* measure nothing", err.splitlines()[-1])


def test_validating_on_some_of_what_is_trained_on(tarnn, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 300)
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "b.txt").write_text("b" * 300)
    (tmp_path / "val" / "d.txt").write_text("d" * 300)
    argv = ("train", tmp_path / "a.txt", tmp_path / "b.txt", "--out", tmp_path / "run", *TINY, "--context", 16)
    code, _, err = tarnn(*argv, "--steps", 1, "--sample-tokens", 0, "--val", tmp_path / "val")
    assert code == 0
    assert "1 of the 2 documents of --val are among those to train on, too" in err
