"""What all scripts are made with: settings, where results go, what a run leaves, pictures and tables."""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

from scripts.common.options import ROOT, as_facts, parse
from scripts.common.plots import label, line, panels
from scripts.common.provenance import command
from scripts.common.results import Unmeasured, earlier, run
from scripts.common.tables import markdown

FULL = {"steps": 9, "widths": [5, 6], "rate": float, "fast": False, "data": Path("there")}
HERE = str(ROOT / "experiments" / "x.py")


@pytest.fixture
def parsed(monkeypatch):
    """parsed(*argv): the options of a script x.py."""
    threads = torch.get_num_threads()

    def parsed(*argv, full=FULL):
        monkeypatch.setattr(sys, "argv", ["x.py", "--threads", "1", *map(str, argv)])
        return parse(HERE, "what it does", full, {"steps": 2, "widths": [1]})

    yield parsed
    torch.set_num_threads(threads)


def test_settings_are_the_full_ones_the_quick_ones_and_what_is_said_over_them(parsed):
    full = parsed()
    assert (full.steps, full.widths, full.rate, full.fast, full.data) == (9, [5, 6], None, False, Path("there"))
    quick = parsed("--quick", "--widths", 3, 4, "--rate", 0.5, "--fast")
    assert (quick.steps, quick.widths, quick.rate, quick.fast) == (2, [3, 4], 0.5, True)
    facts = {"steps": 2, "widths": [3, 4], "rate": 0.5, "fast": True, "data": "there", "quick": True}
    assert as_facts(quick) == facts


def test_only_a_full_run_lands_where_results_are_committed(parsed, tmp_path):
    assert parsed().out == parsed("--data", "elsewhere").out == ROOT / "experiments" / "results"
    assert parsed("--quick").out == parsed("--steps", 8).out == ROOT / "runs" / "experiments"
    assert parsed("--quick", "--out", tmp_path).out == tmp_path


def test_commands_say_nothing_of_this_machine():
    words = ["--quick", "--out", "/tmp/x", "--books", "/home/me/books"]
    assert command("benchmarks/step.py", words) == "python benchmarks/step.py --quick --books books"
    assert command("a/b.py", ["--out=/tmp/x", "--threads", "1"]) == "python a/b.py --threads 1"


def test_a_run_leaves_its_files_also_when_it_is_interrupted(parsed, tmp_path, pictures, capsys):
    def measure(options, results, keep):
        results["first"] = [1.5]
        keep()
        assert json.loads((tmp_path / "x.json").read_text())["results"] == {"first": [1.5]}
        if options.fast:
            raise KeyboardInterrupt

    def figure(options, facts, results):
        made, (axes,) = panels(1, "title")
        line(axes, [(1, 2.0), (2, None), (3, 4.0)], "#000000 --", "known")
        label(axes, "x", "y", ticks=[1, 2048])
        return made

    report = lambda options, facts, results: markdown(["a", "b"], [["x", None]])  # noqa: E731
    for options, code in (parsed("--out", tmp_path), 0), (parsed("--out", tmp_path, "--fast"), 130):
        assert run(options, measure, report=report, figure=figure) == code
        assert (tmp_path / "x.md").read_text() == "| a | b |\n| --- | --: |\n| x | – |"
        [drawn] = pictures["x.png"].axes[0].lines
        assert list(drawn.get_xdata()) == [1, 3]
        assert (drawn.get_label(), drawn.get_linestyle()) == ("known", "--")
        assert [x.get_text() for x in pictures["x.png"].axes[0].get_xticklabels()] == ["1", "2k"]
    assert "steps  9" in (out := capsys.readouterr()).out
    assert "interrupted: what was measured is kept" in out.err
    data = json.loads((tmp_path / "x.json").read_text())
    assert data["command"] == "python experiments/x.py --threads 1 --fast"
    assert date.fromisoformat(data["date"]) <= date.today()
    assert data["settings"]["steps"] == 9
    assert earlier(tmp_path / "x.json", {"threads": 1}, ["threads"]) == data
    with pytest.raises(Unmeasured, match=r"x.json was measured with threads 1, this is 2: start anew"):
        earlier(tmp_path / "x.json", {"threads": 2}, ["threads"])


def test_nothing_is_measured_of_what_is_wrong(parsed, tmp_path, capsys):
    measure = lambda *_: pytest.fail("measured")  # noqa: E731
    assert run(parsed("--out", tmp_path), measure, check=lambda options: "off by one") == 1
    assert capsys.readouterr().err == "nothing is measured: the check is red: off by one.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_scripts_run_from_anywhere_without_installation(tmp_path):
    words = [sys.executable, ROOT / "benchmarks/step.py", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "--out" in run.stdout, run.stderr
