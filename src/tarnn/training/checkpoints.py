"""Checkpoints that are whole or do not count: marked complete when all of it is written.

The Trainer writes a folder `checkpoint-N`. It counts once it holds the marker, which comes last, by one rename, and
lists every file with its size: it gives away a checkpoint that was cut short afterwards, and holds what the Trainer's
own files do not. Who deletes a checkpoint deletes its marker first. So a process may be killed at any moment, and what
`latest` finds is complete.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open

from tarnn.data.tensor_file import flush
from tarnn.errors import UserError

MARKER = "complete.json"
PARTIAL, DOOMED = ".partial", ".doomed"  # folders being written, being deleted


@dataclass
class RunState:
    """The state of a run beside weights, optimizer and random states."""

    step: int = 0
    seconds: float = 0.0  # of training, interruptions left out
    best_step: int | None = None
    best_measure: float | None = None  # in the unit of the task
    validation_batches: int | None = None  # that a validation takes, where the time is too short for all


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders called checkpoint-N in `folder`, in the order of N, whether complete or not."""
    names = [(int(m[1]), p) for p in folder.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    return [path for _, path in sorted(names)]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. Anything else there is passed over."""
    return [path for path in checkpoints_in(folder) if (path / MARKER).is_file()]


def latest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def finish(checkpoint: Path, state: RunState) -> None:
    """Mark what was written to `checkpoint` as complete, once all of it is on the disk."""
    files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    partial = checkpoint / (MARKER + PARTIAL)
    partial.write_text(json.dumps({**asdict(state), "files": files}, indent=1))
    for path in [*checkpoint.rglob("*"), checkpoint, checkpoint.parent]:
        flush(path)
    partial.rename(checkpoint / MARKER)
    flush(checkpoint)


def rotate(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the last `keep` ≥ 1."""
    assert keep >= 1
    for path in complete(folder)[:-keep]:
        (path / MARKER).unlink()  # first: what is half deleted must not count
        shutil.rmtree(path)


def sweep(folder: Path) -> None:
    """Remove what an interrupted run left half written or half deleted."""
    for path in (folder / PARTIAL, folder / DOOMED, *checkpoints_in(folder)):
        if not (path / MARKER).is_file():
            shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> RunState:
    """The marker's content, if every file that it lists is there in full.

    Raises UserError that names the file, what was expected and what to do.
    """
    with reading(checkpoint):
        marker = json.loads((checkpoint / MARKER).read_text())
        files = marker.pop("files")
        marker.pop("matmul_precision", None)  # of older checkpoints
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
