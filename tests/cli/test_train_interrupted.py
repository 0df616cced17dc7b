"""kill -9 at any moment, then the same command with --resume: the same losses, the same weights, to the bit."""

import json
import multiprocessing
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

KILLED_RUN = str(Path(__file__).with_name("killed_run.py"))
OPTIONS = (
    "--hidden-size 32 --layers 2 --heads 2 --context 16 --batch-size 2 --steps 13 --eval-every 3 --save-every 4 "
    "--dropout 0.1 --accumulate 2 --keep 1"
).split()
LAST = "checkpoints/checkpoint-13/model.safetensors"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i * i} and {i % 7} make {i * i + i % 7}.\n" for i in range(120)))
    return path


@pytest.fixture(scope="module")
def processes():
    """A server that has imported everything once and forks a process for each run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runpy", "tarnn.cli.train", "tarnn.training.run", "transformers.modeling_utils"])
    return context


@pytest.fixture(scope="module")
def run(processes, text):
    """run(out, *options, moment, at) → exit code of `tarnn train` in a process of its own."""

    def start(out, *options, moment="", at=0):
        argv = ["train", str(text), "--out", str(out), *OPTIONS, *options]
        given = {"ARGV": argv, "MOMENT": moment, "AT": at}
        process = processes.Process(target=runpy.run_path, args=(KILLED_RUN, given, "run"))
        process.start()
        process.join(120)
        return process.exitcode

    return start


def log_of(out):
    """The lines of a run's log without what the clock says."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run(out) == 0
    return out


@pytest.mark.parametrize(
    ("moment", "at"),
    [
        ("before the settings", 1),
        ("half the text", 1),
        ("in a step", 2),  # before the first checkpoint
        ("half the weights", 1),
        ("half the optimizer", 3),
        ("before the marker", 1),
        ("before the rename", 12),
        ("before the rotation", 2),
        ("half rotated", 1),
        ("half the best model", 9),
        ("half a line of the log", 9),
        ("in a step", 10),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(run, uninterrupted, tmp_path, moment, at):
    out = tmp_path / "run"
    assert run(out, moment=moment, at=at) == -signal.SIGKILL
    assert not (out / LAST).exists()
    assert run(out, "--resume") == 0
    assert log_of(out) == log_of(uninterrupted)
    for weights in (LAST, "model.safetensors"):
        assert (out / weights).read_bytes() == (uninterrupted / weights).read_bytes()
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"checkpoint-13"}
    assert {path.name for path in out.iterdir()} == {path.name for path in uninterrupted.iterdir()}
