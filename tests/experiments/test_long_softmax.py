"""The comparison of attentions in language models: runs, goes on after an interruption, and tells what it found."""

import gzip
import json
import random

import long_softmax
import pytest
from safetensors.torch import load_file
from support.scripts import lines_of

from tarnn.models import TarnnForCausalLM
from tarnn.tasks.text.task import text_config
from tarnn.training.log import read_log

TINY = ("--quick", "--steps", 4, "--eval-every", 2, "--redraw-every", 2)


@pytest.fixture
def books(tmp_path):
    """A few books, one of them packed."""
    folder, words = tmp_path / "books", random.Random(0)
    folder.mkdir()
    for i, name in enumerate(("one.txt", "two.txt.gz", "pride_and_prejudice.txt.gz")):
        text = "".join(words.choice(["the cat ", "a hat ", "sat on ", "the mat.\n"]) for _ in range(400 + i)).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return folder


@pytest.fixture
def experiment(script, books, tmp_path):
    return lambda *options: script("long_softmax", "--books", books, "--runs", tmp_path / "runs", *TINY, *options)


def test_runs_at_equal_steps_and_what_is_written(experiment, data_of, pictures, tmp_path):
    names = ["softmax", "Performer-softmax, redrawn", "Performer-softmax, drawn once"]
    code, out, _ = experiment("--only", *names, "--seeds", 0, 1)
    assert code == 0
    data = data_of("long_softmax")
    assert list(data["results"]) == names
    for first, second in data["results"].values():
        assert (first["seed"], second["seed"]) == (0, 1)
        assert first["bits_per_byte"] != second["bits_per_byte"]
        for found in (first, second):
            assert found["steps"] == [2, 4]
            assert found["bits_per_byte"][1] < found["bits_per_byte"][0] < 9
            assert not found["stopped"]
    draws = []
    for folder in ("Performer-softmax_redrawn_0", "Performer-softmax_drawn_once_0"):
        weights = load_file(tmp_path / "runs" / folder / "checkpoints" / "checkpoint-4" / "model.safetensors")
        draws.append(weights["model.layers.0.attention.feature_map.draw"].item())
    assert draws == [1, 0]  # of the steps from the third on, and for ever
    assert not (tmp_path / "runs" / "text" / "pride_and_prejudice.txt").exists()
    [axes] = pictures["long_softmax.png"].axes
    assert len(axes.lines) == 6
    first = {n: (x["steps"], x["bits_per_byte"]) for n, (x, _) in data["results"].items()}
    assert first.items() <= lines_of(axes).items()
    a, b = (x["bits_per_byte"][-1] for x in data["results"]["softmax"])
    assert f"| softmax | 2 | {(a + b) / 2:.3f} ± {abs(a - b) / 2:.3f} |" in out  # the error of a mean of two
    assert str(tmp_path) not in json.dumps(data)


def test_all_variants_have_the_same_parameters(monkeypatch, books):
    monkeypatch.setattr("sys.argv", ["long_softmax.py", "--books", str(books), "--quick"])
    options = long_softmax.settings()
    every = [long_softmax.variant(name, 0, books, books, options) for name in long_softmax.VARIANTS]
    sizes = {TarnnForCausalLM(text_config(x)).num_parameters() for x in every}
    assert len(every) == 6
    assert len(sizes) == 1


def test_what_is_complete_is_not_run_again_and_longer_goes_on(experiment, tmp_path):
    experiment("--only", "elu + 1")
    log = tmp_path / "runs" / "elu_+_1_0" / "log.jsonl"
    before = log.read_text()
    experiment("--only", "elu + 1")
    assert log.read_text() == before
    experiment("--only", "elu + 1", "--steps", 6)
    assert [line["step"] for line in read_log(log) if "validation_loss" in line] == [2, 4, 6]
    assert log.read_text().startswith(before)


def test_a_run_that_breaks_is_a_result(experiment, data_of, tmp_path):
    experiment("--only", "elu + 1", "--learning-rate", "1e30")
    [found] = data_of("long_softmax")["results"]["elu + 1"]
    assert "not finite" in found["stopped"]
    assert "stopped: not a number" in (tmp_path / "results" / "long_softmax.md").read_text()


def test_books_that_are_not_there(experiment, books):
    (books / "pride_and_prejudice.txt.gz").unlink()
    code, _, err = experiment()
    assert code == 1
    assert "pride_and_prejudice among them; it has one, two" in err
