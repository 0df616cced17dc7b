"""Checkpoints that are whole or not there: written aside, marked complete, flushed, then renamed.

A folder named `checkpoint-N` comes into being by one rename, after everything in it has been written; it goes
by one rename, before anything in it is deleted. So a process may be killed at any moment, and what `latest`
finds is complete. The marker, written last, lists every file with its size: it gives away a checkpoint that
was cut short afterwards, and holds what the Trainer's own files do not.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open

from tarnn.errors import UserError
from tarnn.tasks import TASKS

MARKER = "complete.json"
PARTIAL, DOOMED = ".partial", ".doomed"  # being written, being deleted


@dataclass
class RunState:
    """What a run must remember beside weights, optimizer and random states."""

    step: int = 0
    seconds: float = 0.0  # of training, interruptions left out
    best_step: int | None = None
    best_bits_per_byte: float | None = None  # of images: bits per dimension
    validation_batches: int | None = None  # that a validation takes, where the time is too short for all


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. Anything else there is passed over."""
    found = [(int(m[1]), p) for p in folder.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    return [path for _, path in sorted(found) if (path / MARKER).is_file()]


def latest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def finish(partial: Path, state: RunState) -> Path:
    """Mark what was written to `partial` as complete and give it its name; returns where it is then."""
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / MARKER).write_text(json.dumps({**asdict(state), "files": files}, indent=1))
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    target = partial.parent.parent / f"checkpoint-{state.step}"
    if target.exists():  # of a run that went further than the checkpoint it was resumed from
        delete(target)
    partial.rename(target)
    flush(target.parent)
    return target


def flush(path: Path) -> None:
    """Hand a file or folder to stable storage: a power cut must not undo what is marked as complete."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(checkpoint: Path) -> None:
    """Rename first: what is half deleted must not look like a checkpoint."""
    doomed = checkpoint.with_name(DOOMED)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def rotate(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the last `keep` ≥ 1."""
    assert keep >= 1
    for path in complete(folder)[:-keep]:
        delete(path)


def sweep(folder: Path) -> None:
    """Remove what an interrupted run left half written or half deleted."""
    for name in (PARTIAL, DOOMED):
        shutil.rmtree(folder / name, ignore_errors=True)


def read_state(checkpoint: Path) -> RunState:
    """The marker's content, if every file that it lists is there in full.

    Raises UserError that names the file, what was expected and what to do.
    """
    with reading(checkpoint):
        marker = json.loads((checkpoint / MARKER).read_text())
        files = marker.pop("files")
        state = RunState(**marker)
    for name, size in files.items():
        path = checkpoint / name
        got = path.stat().st_size if path.is_file() else None
        if got != size:
            what = "is missing" if got is None else f"has {got:,} bytes where {size:,} were written"
            raise UserError(f"{path} {what}: the checkpoint is damaged. {remedy(checkpoint)}")
    with reading(checkpoint):
        json.loads((checkpoint / "trainer_state.json").read_text())
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
    return state


def refuse_other_kind(checkpoint: Path) -> None:
    """UserError where the model in it is not one of ours."""
    with reading(checkpoint):
        kind = json.loads((checkpoint / "config.json").read_text()).get("model_type")
    kinds = [task.model_type for task in TASKS.values()]
    if kind not in kinds:
        raise UserError(
            f"{checkpoint} holds a model of another kind ({kind!r}); expected {' or '.join(map(repr, kinds))}. "
            f"{remedy(checkpoint)}"
        )


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Whatever goes wrong while a checkpoint is read becomes one sentence about that checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors, pickle, zip and json each have their own
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{checkpoint} can't be read ({type(error).__name__}: {reason}). {remedy(checkpoint)}"
        ) from error


def remedy(checkpoint: Path) -> str:
    older = [path for path in complete(checkpoint.parent) if path != checkpoint]
    if older:
        return f"Delete that folder and --resume goes on from {older[-1]}."
    return f"There is no older one; delete {checkpoint.parent.parent} and begin again."
