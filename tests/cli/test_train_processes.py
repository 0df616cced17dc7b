"""Runs in processes of their own: killed at any moment and resumed, and two that train together."""

import json
import multiprocessing
import runpy
import signal
import socket
from pathlib import Path

import pytest
import torch

KILLED_RUN = str(Path(__file__).parents[1] / "support" / "killed_run.py")
OPTIONS = [
    "--hidden-size", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch-size", "2",
    "--steps", "13", "--eval-every", "3", "--save-every", "4", "--dropout", "0.1", "--accumulate", "2",
    "--keep", "1",
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
        sample = [] if "masked-lm" in options else ["--sample-tokens", "4"]
        argv = ["train", str(text), "--out", str(out), *OPTIONS, *sample, *options]
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


@pytest.fixture
def run_all(start, tmp_path):
    """run_all(n, out, *options) → the exit codes of n processes that train together, and what each said on stderr.

    others: options of all but the first process. moment, at: of the last.
    """

    def wait(n, out, *options, others=(), moment="", at=0):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        world = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(n):
            own = {**world, "RANK": rank, "LOCAL_RANK": rank, "STDERR": tmp_path / f"stderr-{rank}"}
            last = {"moment": moment, "at": at} if rank == n - 1 else {}
            environment = {name: str(value) for name, value in own.items()}
            processes.append(start(out, *options, *(others if rank else ()), environment=environment, **last))
        for process in processes:
            process.join(120)
        said = [(tmp_path / f"stderr-{rank}").read_text() for rank in range(n)]
        return [process.exitcode for process in processes], said

    return wait


@pytest.fixture
def assert_alike(run, run_all, tmp_path):
    """assert_alike(options of one process, [(processes, steps, options), …]): one process and many, which go on from one
    another, have the same losses at the same steps, but for rounding. The folders are `one` and `many`."""

    def compare(options, many):
        for n, steps, more in many:
            length = ["--steps", str(steps), "--resume"]
            assert run(tmp_path / "one", *options, *length) == 0
            codes, said = run_all(n, tmp_path / "many", *options, *more, *length)
            assert codes == [0] * n, said
        for a, b in zip(log_of(tmp_path / "one"), log_of(tmp_path / "many"), strict=True):
            assert a == pytest.approx(b, rel=1e-4)  # a perplexity has several times the error of its loss

    return compare


STEADY = ["--dropout", "0", "--sample-tokens", "0"]


@pytest.mark.slow
def test_processes_train_as_one_does_with_a_larger_batch_and_go_on_in_any_number(assert_alike, run_all, tmp_path):
    half = ["--batch-size", "2"]
    assert_alike([*STEADY, "--batch-size", "4"], [(2, 4, half), (1, 8, half), (4, 13, half)])
    codes, said = run_all(3, tmp_path / "many", *STEADY, *half, "--steps", "14", "--resume")
    assert codes == [2] * 3
    assert "a step of this run has 8 examples, which 3 processes can't share equally" in said[0]


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_do(assert_alike, tmp_path):
    """FSDP2; the model that is left in the folder is whole."""
    from tarnn.tasks.checkpoint import open_model

    sharded = ["--set", "fsdp=true", "--batch-size", "2"]
    assert_alike([*STEADY, "--batch-size", "4"], [(2, 4, sharded), (4, 8, sharded)])
    one, many = (dict(open_model(tmp_path / name).named_parameters()) for name in ("one", "many"))
    for name, x in one.items():
        torch.testing.assert_close(many[name], x, rtol=1e-4, atol=1e-6)


def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(run_all, tmp_path):
    options = ["--steps", "1000000", "--save-every", "1000000", "--eval-every", "1000000"]
    codes, _ = run_all(2, tmp_path / "two", *options, moment="a signal in a step", at=3)
    assert codes == [128 + signal.SIGTERM] * 2
    assert [path.name for path in (tmp_path / "two/checkpoints").iterdir()] == ["checkpoint-4"]


def test_what_stops_one_process_stops_all_with_one_sentence(run_all, tmp_path):
    out = tmp_path / "taken"
    out.mkdir()
    (out / "diary.txt").touch()
    codes, said = run_all(2, out)
    assert codes == [2, 2]
    assert said[0].startswith("tarnn: error: ")
    assert "diary.txt" in said[0]
    assert said[1] == ""
    codes, said = run_all(2, tmp_path / "two", others=["--context", "8"])
    assert codes == [2, 2]
    assert "process 1 of 2 has other settings than process 0: context is 8 there and 16 here" in said[0]
    assert said[1] == ""
    assert not (tmp_path / "two").exists()


def test_a_killed_process_ends_the_others_with_a_sentence_each(run_all, tmp_path):
    codes, said = run_all(3, tmp_path / "three", moment="in a step", at=5)
    assert codes == [2, 2, -signal.SIGKILL]
    for rank in (0, 1):
        last = said[rank].splitlines()[-1]
        assert last.startswith(f"tarnn: error: process {rank} of 3: another process has died or can't be reached")
        assert "checkpoint-4" in last
        assert "Traceback" not in said[rank]
