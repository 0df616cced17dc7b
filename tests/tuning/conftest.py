"""Folders of tiny models, and data to tune them on."""

import json
import multiprocessing
import runpy
from pathlib import Path

import pytest
from support.open_folders import make_folder

KILLED_RUN = str(Path(__file__).parents[1] / "support" / "killed_run.py")
OTHER = {
    "Falcon-H1-0.5B": {"lm_head_multiplier": 1.0},  # or the loss hardly moves
    "Granite-4.0-h-micro": {"logits_scaling": 1.0},
    "Granite-4.0-h-tiny": {"logits_scaling": 1.0},
    "Mamba": {"scale": 2},  # whose rounding grows most
    "Nemotron-H-8B": {"moe_shared_expert_intermediate_size": 48},  # a default, larger than the model
}
ANSWERS = {"red": "rouge", "blue": "bleu", "green": "vert"}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(family) → the folder of a tiny model of it, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_folder(
                tmp_path_factory.mktemp("folder") / "model", family, **{"scale": 3} | OTHER.get(family, {})
            )
        return made[family]

    return make


@pytest.fixture
def chats(tmp_path):
    """A table of conversations: a colour is translated."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": y}]} for x, y in ANSWERS.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return path


def spawned(argv, moment, at):
    scope = {"ARGV": [str(x) for x in argv], "ENVIRONMENT": {"OMP_NUM_THREADS": "1"}, "MOMENT": moment, "AT": at}
    runpy.run_path(KILLED_RUN, scope, run_name="run")


@pytest.fixture
def run_alone():
    """run_alone(*argv, moment=, at=) → the exit code of a process of its own, which may be killed at that moment."""

    def run(*argv, moment="", at=0):
        process = multiprocessing.get_context("spawn").Process(target=spawned, args=(argv, moment, at))
        process.start()
        process.join()
        return process.exitcode

    return run
