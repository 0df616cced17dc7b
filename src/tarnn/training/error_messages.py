"""Errors that mean a full disk, a full memory, or a --set that can't be, and what to say then."""

import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tarnn.errors import OneProcessError, UserError, is_out_of_memory
from tarnn.tasks import RunSettings
from tarnn.training import checkpoints
from tarnn.training.processes import is_loss, of_process

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew beyond the limit on file sizes",
}


def write_failure(error: BaseException) -> str | None:
    """Why a file could not be written, if that is what the error means; else None.

    Only Python's own writes raise an OSError. safetensors and tokenizers (a bare Exception) put its number into
    the text, and torch.save says just that its stream is broken.
    """
    if isinstance(error, OSError):
        return FULL.get(error.errno or 0)
    if type(error) in (SafetensorError, Exception):
        return next((why for number, why in FULL.items() if f"os error {number})" in str(error)), None)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    torchs = [frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__") == "torch.serialization"]
    if isinstance(error, RuntimeError) and "save" in torchs:
        return "the disk is full, or a file grew beyond the limit on file sizes"
    return None


@contextmanager
def failures_explained(folder: Path) -> Iterator[None]:
    """A full disk, a full memory or a lost process becomes one sentence: what happened, what is still good, what to do."""
    try:
        yield
    except Exception as error:
        reason = write_failure(error)
        if reason is None and not is_out_of_memory(error) and not is_loss(error):
            raise
        last = checkpoints.latest(folder / "checkpoints")
        kept = f"The last good checkpoint is {last}." if last else "No checkpoint had been written yet."
        text = " ".join(str(error).split())[:120]
        if reason is not None:
            what, remedy = f"writing to {folder} failed: {reason}", "Make room and run the same command with --resume."
        elif is_loss(error):
            what = f"another process has died or can't be reached ({text})"
            remedy = "Look above for what it said, and start all of them again with --resume."
        else:
            what = f"the memory is used up ({text})"
            remedy = "Choose a smaller --batch-size, --context or --hidden-size."
        raise OneProcessError(f"{of_process()}{what}. {kept} {remedy}") from error


@contextmanager
def assignments_blamed(settings: RunSettings, begun: Callable[[], bool]) -> Iterator[None]:
    """An error of the Trainer before the first step is finished is put down to --set, where there is any."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if not settings.training_arguments or begun() or is_out_of_memory(error) or is_loss(error):
            raise
        given = " ".join(f"--set {key}={value}" for key, value in settings.training_arguments.items())
        raise UserError(
            f"the run can't start with {given}: {type(error).__name__}: {' '.join(str(error).split())[:300]}. Leave out "
            "what is wrong there (TARNN_TRACEBACK=1 shows where it fails)."
        ) from error
