"""One server at a time has a folder of states; its processes share it."""

import errno
import os
import secrets
import time
from pathlib import Path

from tarnn.errors import UserError

OWNER = secrets.token_hex(16)  # of this process and those that are forked from it
PATIENCE = 30.0  # seconds to wait for another process of the same server, which is cleaning up


class FolderLock:
    """The right to use a folder, until it is closed or the process ends, however it ends.

    first: whether nobody else has it; then others wait until `share`. owner: what processes of one server have in common.

    Raises UserError where another server has the folder, or where it can't be written.
    """

    def __init__(self, folder: Path, owner: str | None):
        self._owner = owner or OWNER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(
                f"states can't be kept in {folder}: {error.strerror}. Give a folder that this user may write to."
            ) from error
        try:
            self.first = self._take(folder)
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Let other processes of the same server in."""
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._file)

    def _take(self, folder: Path) -> bool:
        from fcntl import LOCK_EX, LOCK_NB, LOCK_SH

        end = time.monotonic() + PATIENCE
        while True:
            if self._flock(LOCK_EX | LOCK_NB):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, self._owner.encode(), 0)
                return True
            owner = os.pread(self._file, 200, 0).decode(errors="replace")
            if owner == self._owner and self._flock(LOCK_SH | LOCK_NB):
                return False
            if (owner and owner != self._owner) or time.monotonic() > end:
                raise UserError(
                    f"the states in {folder} belong to a server that is running. Stop it first, or give this one another "
                    "folder; workers of one server share theirs."
                )
            time.sleep(0.01)

    def _flock(self, how: int) -> bool:
        import fcntl

        try:
            fcntl.flock(self._file, how)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True
