"""`tarnn train` as a user starts it: killed from outside, resumed, refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TINY = [
    "--hidden-size", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch-size", "4", "--eval-every",
    "8", "--save-every", "4", "--sample-tokens", "0", "--val-fraction", "0.1",
]  # fmt: skip
LAST = "checkpoints/checkpoint-60/model.safetensors"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    words = random.Random(0)
    path.write_text("".join(words.choice(["one ", "two ", "three\n"]) for _ in range(1000)))
    return path


def start(*argv):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(BIN / "tarnn"), *map(str, argv)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses_of(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in lines]


@pytest.mark.slow
def test_kill_9_then_resume(text, tmp_path, tarnn):
    options = ["train", text, *TINY, "--steps", 60, "--dropout", 0.1]
    process = start(*options, "--out", tmp_path / "run")
    while not (tmp_path / "run/checkpoints/checkpoint-12").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / LAST).exists()

    resumed = start(*options, "--out", tmp_path / "run", "--resume")
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert "resuming from" in err
    assert str(tmp_path / "run") in out
    assert tarnn(*options, "--out", tmp_path / "whole")[0] == 0  # the same run, never interrupted
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert (tmp_path / "run" / LAST).read_bytes() == (tmp_path / "whole" / LAST).read_bytes()


def test_a_refusal(text, tmp_path):
    process = start("train", text, "--out", tmp_path / "run", "--context", 0)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "tarnn: error: --context 0 is not possible; expected 1 or more.\n"
    assert not (tmp_path / "run").exists()
