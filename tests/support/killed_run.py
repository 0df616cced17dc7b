"""Runs `tarnn ARGV` in a process of its own, which may die by SIGKILL at MOMENT: for tests/cli/test_train_processes.py.

What is killed is never asked: no handler, no `finally`, no flush of Python's buffers.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

ARGV: list[str]
ENVIRONMENT: dict[str, str]
MOMENT: str
AT: int  # the step, or the how manyeth time, from which MOMENT is deadly


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Replaces `owner.name` by replacement(original, …)."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))


def halve(path: Path | str) -> None:
    """Cut a file in the middle, as if its writing had only come so far."""
    os.truncate(path, Path(path).stat().st_size // 2)


def at(step: int) -> bool:
    return step >= AT


def arm(moment: str) -> None:
    import torch
    import transformers.modeling_utils

    from tarnn.tasks.text import corpus
    from tarnn.training import checkpoints, folder, log, safe_trainer

    calls = {"n": 0}

    def nth() -> bool:
        calls["n"] += 1
        return at(calls["n"])

    def half_written(write, *args, **kwargs):
        result = write(*args, **kwargs)
        path = next(a for a in args if isinstance(a, str | Path))
        if nth():
            halve(path)
            die()
        return result

    def in_a_step(original, self, *args, **kwargs):
        return die() if at(self.state.global_step) else original(self, *args, **kwargs)

    def signalled(original, self, *args, **kwargs):
        if self.state.global_step == AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    def after(original, *args, **kwargs):
        result = original(*args, **kwargs)
        return die() if nth() else result

    def before(original, *args, **kwargs):
        return die() if nth() else original(*args, **kwargs)

    def half_deleted(original, path, *args, **kwargs):
        if Path(path).name.startswith("checkpoint-") and nth():
            next(Path(path).iterdir()).unlink()
            die()
        return original(path, *args, **kwargs)

    def half_a_line(original, self, args, state, control, **kwargs):
        result = original(self, args, state, control, **kwargs)
        if at(state.global_step):
            os.truncate(self.path, self.path.stat().st_size - 20)
            die()
        return result

    moments = {
        "in a step": lambda: patch(safe_trainer.SafeTrainer, "compute_loss", in_a_step),
        "a signal in a step": lambda: patch(safe_trainer.SafeTrainer, "compute_loss", signalled),
        "half the weights": lambda: patch(transformers.modeling_utils, "safe_save_file", half_written),
        "half the optimizer": lambda: patch(torch, "save", half_written),
        "before the marker": lambda: patch(checkpoints, "finish", before),
        "before the rename": lambda: patch(checkpoints, "flush", before),
        "before the rotation": lambda: patch(checkpoints, "rotate", before),
        "half rotated": lambda: patch(checkpoints.shutil, "rmtree", half_deleted),
        "half a line of the log": lambda: patch(log.LogFile, "on_log", half_a_line),
        "half the text": lambda: patch(corpus, "write_ids", after),
        "before the settings": lambda: patch(folder.os, "replace", before),
        "half the best model": lambda: patch(Path, "rename", after),
    }
    moments[moment]()


if __name__ == "run":  # the name that runpy was asked to give it
    os.environ.update(ENVIRONMENT)
    if "STDERR" in ENVIRONMENT:  # a file
        sys.stderr = open(ENVIRONMENT["STDERR"], "w", buffering=1)  # noqa: SIM115
    from tarnn.cli.main import main

    if MOMENT:
        arm(MOMENT)
    raise SystemExit(main(ARGV))
