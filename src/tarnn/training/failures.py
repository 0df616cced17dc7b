"""Which errors mean that a file could not be written, and what to say then."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tarnn.errors import UserError
from tarnn.training import checkpoints

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file-size limit"}
# torch.save and safetensors raise no OSError, only text
TEXTS = ("no space left", "os error 28", "file too large", "os error 27", "quota", "writer failed", "failed writing")


def write_failure(error: BaseException) -> str | None:
    """Why a file could not be written, if that is what the error says; else None."""
    if isinstance(error, OSError) and error.errno in FULL:
        return FULL[error.errno]
    text = str(error).lower()
    if isinstance(error, SafetensorError | RuntimeError | OSError) and any(known in text for known in TEXTS):
        return " ".join(str(error).split())[:160]
    return None


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """A file that could not be written becomes one sentence: where, why, what is still good, what to do."""
    try:
        yield
    except Exception as error:
        reason = write_failure(error)
        if reason is None:
            raise
        last = checkpoints.latest(folder / "checkpoints")
        kept = f"The last good checkpoint is {last}." if last else "No checkpoint had been written yet."
        raise UserError(
            f"writing to {folder} failed: {reason}. {kept} Make room and run the same command with --resume."
        ) from error
