"""Folders of tiny models, and data to tune them on."""

import json
import multiprocessing
import runpy
from pathlib import Path

import pytest
from support.open_folders import make_folder

KILLED_RUN = str(Path(__file__).parents[1] / "support" / "killed_run.py")
ANSWERS = {"red": "rouge", "blue": "bleu", "green": "vert"}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """folder_of(family) → the folder of a tiny model of it, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_folder(tmp_path_factory.mktemp("folder") / "model", family)
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
