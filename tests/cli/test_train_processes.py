"""Runs in processes of their own: killed at any moment and resumed, and two that train together."""

import json
import multiprocessing
import runpy
import signal
import socket
from pathlib import Path

import pytest

KILLED_RUN = str(Path(__file__).parents[1] / "support" / "killed_run.py")
OPTIONS = [
    "--hidden-size", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch-size", "2",
    "--steps", "13", "--eval-every", "3", "--save-every", "4", "--dropout", "0.1", "--accumulate", "2",
    "--keep", "1", "--sample-tokens", "4",
]  # fmt: skip
LAST = "checkpoints/checkpoint-13/model.safetensors"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i * i} and {i % 7} make {i * i + i % 7}.\n" for i in range(120)))
    return path


@pytest.fixture(scope="module")
def start(text):
    """start(out, *options, moment, at, environment) → a process that runs `tarnn train`.

    It is forked from a server that has imported everything once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runpy", "tarnn.cli.train", "tarnn.training.run", "transformers.modeling_utils"])

    def fork(out, *options, moment="", at=0, environment=()):
        argv = ["train", str(text), "--out", str(out), *OPTIONS, *options]
        given = {"ARGV": argv, "MOMENT": moment, "AT": at, "ENVIRONMENT": {"OMP_NUM_THREADS": "1", **dict(environment)}}
        process = context.Process(target=runpy.run_path, args=(KILLED_RUN, given, "run"))
        process.start()
        return process

    return fork


@pytest.fixture(scope="module")
def run(start):
    """The same, and its exit code."""

    def wait(*args, **kwargs):
        process = start(*args, **kwargs)
        process.join(120)
        return process.exitcode

    return wait


def log_of(out):
    """The lines of a run's log without what the clock says."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run(out) == 0
    return out


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_processes_train_as_one_does_with_twice_the_batch(start, run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for options in (["--steps", "8"], ["--steps", "12", "--resume"]):
        options += ["--dropout", "0"]
        ranks = [
            start(tmp_path / "two", *options, environment={**world, "RANK": rank, "LOCAL_RANK": rank})
            for rank in ("0", "1")
        ]
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
        assert run(tmp_path / "one", *options, "--batch-size", "4") == 0
    for two, one in zip(log_of(tmp_path / "two"), log_of(tmp_path / "one"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    assert run(tmp_path / "two", "--steps", "13", "--dropout", "0", "--resume") == 2  # it began with two


def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = ["--steps", "1000000", "--save-every", "1000000", "--eval-every", "1000000"]
    ranks = [
        start(
            tmp_path / "two",
            *options,
            environment={**world, "RANK": rank, "LOCAL_RANK": rank},
            moment="a signal in a step" if rank == "1" else "",
            at=3,
        )
        for rank in ("0", "1")
    ]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (tmp_path / "two/checkpoints").iterdir()] == ["checkpoint-4"]
