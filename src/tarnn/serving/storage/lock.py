"""One server at a time has a folder of states."""

import errno
import os
from pathlib import Path

from tarnn.errors import UserError


def lock_folder(folder: Path) -> int:
    """Take a folder for this store alone; return the descriptor that keeps it until it is closed or the process ends.

    Raises UserError where another server has the folder, or where it can't be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            f"states can't be kept in {folder}: {error.strerror}. Give a folder that this user may write to."
        ) from error
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        flock(file, LOCK_EX | LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise UserError(
            f"the states in {folder} belong to a server that is running. Stop it first, or give this one another folder: "
            "each server has one of its own."
        ) from error
    return file
