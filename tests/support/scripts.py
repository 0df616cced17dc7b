"""Fixtures that run a benchmark or an experiment in this process, with results in tmp_path/results."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matplotlib.figure import Figure

from scripts.common import plots

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path):
    """Where the results go."""
    return tmp_path / "results"


@pytest.fixture
def pictures(monkeypatch):
    """Figures by the name of their file, as they would have been saved: what they show can be asked, and no time is
    spent on drawing."""
    saved: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "write", lambda figure, path: saved.update({path.name: figure}) or path.touch())
    return saved


@pytest.fixture
def script(capsys, monkeypatch, folder, pictures):
    """script(name, *options) → (exit code, stdout, stderr)."""
    threads = torch.get_num_threads()

    def run(name: str, *options: object) -> Outcome:
        argv = [f"{name}.py", "--threads", "1", "--out", str(folder), *map(str, options)]
        monkeypatch.setattr(sys, "argv", argv)
        code = importlib.import_module(name).main()
        return Outcome(code, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def data_of(folder):
    """data_of(name): what NAME.json holds."""
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def runnable(folder: str) -> list[str]:
    """The names of a folder's scripts, without the modules that they share."""
    return sorted(path.stem for path in (ROOT / folder).glob("*.py") if "__main__" in path.read_text())


def opens(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a script's imports and options can be read: its --help ends with 0."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    return ended.value.code == 0


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """What is drawn on the axes: label → (x, y)."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}
