"""Which errors mean that a file could not be written, and what to say then."""

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tarnn.errors import UserError
from tarnn.training import checkpoints

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
    torchs = [
        frame.f_code.co_name for frame in frames if frame.f_globals["__name__"] == "torch.serialization"
    ]
    if isinstance(error, RuntimeError) and "save" in torchs:
        return "the disk is full, or a file grew beyond the limit on file sizes"
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
