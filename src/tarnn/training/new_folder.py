"""Folders that a command fills: a model is in them whole or not at all, however the command ends."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tarnn.data.tensor_file import flush
from tarnn.errors import UserError
from tarnn.training.checkpoints import PARTIAL
from tarnn.training.error_messages import write_failure
from tarnn.training.lock import NAME

BEGUN = {NAME, "log.jsonl", "checkpoints", PARTIAL}  # what a training has before its first checkpoint


def check_new(out: Path) -> None:
    """UserError where `out` holds something already, or no folder can be made there: asked before any work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; name a new folder.")
    check_writable(out)


def check_trained(out: Path, resume: bool) -> None:
    """Check a folder in which a training may be resumed, or was killed before its first checkpoint."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a new folder.")
    if not resume and out.exists() and not is_only_begun(out):
        raise UserError(f"{out} exists already; name a new folder, or go on in it with --resume.")
    check_writable(out)


def check_writable(out: Path) -> None:
    """UserError where the folder, or the nearest one above it that is there, can't be written."""
    above = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{out} can't be made: {above} is no folder that can be written. Name another folder.")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, which takes that name once all is written.

    A command that is killed leaves `.NAME.partial`, which the next one for the same name removes.
    """
    beside = out.absolute().parent / f".{out.absolute().name}{PARTIAL}"
    with written_aside(beside):
        yield beside
        flush_all(beside)
        if out.exists():
            out.rmdir()
        beside.rename(out)


@contextmanager
def whole_model(out: Path) -> Iterator[Path]:
    """A folder within `out`, where a training lies, to write its model into; the files move to `out` when all are written,
    config.json last."""
    beside = out / PARTIAL
    with written_aside(beside):
        yield beside
        flush_all(beside)
        for path in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, out / path.name)
        beside.rmdir()


@contextmanager
def written_aside(beside: Path) -> Iterator[None]:
    """An empty folder `beside`, which is gone where what is done within fails; UserError for a full disk."""
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if reason := write_failure(error):
            raise UserError(
                f"writing to {beside.parent} failed: {reason}. Nothing is left of it; make room and run the command again."
            ) from error
        raise


def is_only_begun(out: Path) -> bool:
    """Whether a folder holds nothing but what a training leaves before its first checkpoint."""
    return {path.name for path in out.iterdir()} <= BEGUN and not any(out.glob("checkpoints/checkpoint-*"))


def flush_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        flush(path)
