"""Each example runs as it stands, and its model is opened by transformers alone."""

import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoModelForTokenClassification

from tarnn.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples"
OPENED_BY = {"pairs": AutoModelForSeq2SeqLM, "words": AutoModelForTokenClassification}
DATA = {"pairs": "one\tuno\ntwo\tdos\n", "words": '{"tokens": ["Ada", "wrote"], "labels": ["NAME", "VERB"]}\n'}
pytestmark = pytest.mark.slow


def run(name, capsys, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(OPENED_BY)


@pytest.mark.parametrize("name", OPENED_BY)
def test_an_example_trains_saves_and_opens_again(name, capsys, monkeypatch, tmp_path):
    out = tmp_path / "run"
    trained = run(name, capsys, monkeypatch, "--steps", 20, "--out", out)
    assert OPENED_BY[name].from_pretrained(out).num_parameters() > 0
    again = run(name, capsys, monkeypatch, "--use", out)
    assert trained.splitlines()[-1] == again.splitlines()[-1]
    for command in (["predict", "a text"], ["eval", "a.txt"], ["info"], ["generate", "--prompt", "a"]):
        assert main([command[0], str(out), *command[1:]]) == 2
        assert f"examples/{name}.py" in capsys.readouterr().err


@pytest.mark.parametrize("name", OPENED_BY)
def test_an_example_reads_a_file(name, capsys, monkeypatch, tmp_path):
    (tmp_path / "data").write_text(DATA[name])
    out = run(name, capsys, monkeypatch, tmp_path / "data", "--steps", 2, "--out", tmp_path / "run")
    assert "step 2: loss" in out
