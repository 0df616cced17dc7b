"""Run as a program: a process that holds states is killed, again and again, and what it was told is there must be there.

`python -m support.killed_store FOLDER ROUNDS`, in tests/.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from support.stored import same, served, snapshot_of
from tarnn.serving.state_info import UnknownState
from tarnn.serving.store import StateStore

MODEL = served()


def work(folder: Path, seed: int, told: int) -> None:
    """Hold, fork and delete states until the end, and say what was done once it is."""
    draw = random.Random(seed)
    store, ids = StateStore(MODEL, folder=folder, memory=200_000), []

    def say(*words):
        os.write(told, (" ".join(map(str, words)) + "\n").encode())

    say("open")
    while True:
        tokens = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 9)))
        store.keep("a", snapshot_of(MODEL, tokens[::-1]))
        ids.append(store.hold("a", snapshot_of(MODEL, tokens)).id)
        say("held", ids[-1], *tokens)
        if draw.random() < 0.3:
            ids.append(store.fork("a", ids[-1]).id)
            say("held", ids[-1], *tokens)
        if draw.random() < 0.3:
            id = ids.pop(draw.randrange(len(ids)))
            say("deleting", id)
            store.delete("a", id)
            say("deleted", id)


def check(folder: Path, held: dict[str, tuple], deleted: set[str]) -> None:
    store = StateStore(MODEL, folder=folder)
    for id, tokens in held.items():
        assert same(store.get("a", id), snapshot_of(MODEL, tokens)), id
    for id in deleted:
        try:
            store.get("a", id)
        except UnknownState:
            continue
        raise AssertionError(f"{id} was deleted")
    rows, files = store.stats.disk_states, len(list(folder.glob("states/*/*")))
    assert rows == files, (rows, files)
    store.close()


def in_a_process(function, *arguments) -> int:
    """Started from here, where no thread is, so that it may simply be a copy of this process."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def main(folder: Path, rounds: int) -> None:
    held: dict[str, tuple] = {}
    deleted: set[str] = set()
    for number in range(rounds):
        heard, told = os.pipe()
        child = in_a_process(work, folder, number, told)
        os.close(told)
        with open(heard) as lines:
            assert lines.readline() == "open\n"
            time.sleep(random.Random(number).random() * 0.4)
            os.kill(child, signal.SIGKILL)
            for line in lines:
                word, id, *tokens = line.split()
                if word == "held":
                    held[id] = tuple(map(int, tokens))
                else:
                    held.pop(id, None)
                    deleted |= {id} if word == "deleted" else set()
        os.waitpid(child, 0)
        _, status = os.waitpid(in_a_process(check, folder, held, deleted), 0)
        assert status == 0, f"round {number}"
    print(len(held), len(deleted))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
