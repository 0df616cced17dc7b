"""One run per folder: a lock that the system takes back when its process dies, however it dies."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tarnn.errors import UserError

NAME = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process trains into `folder`. UserError that names the process which does already."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run is training into {folder}{holder(folder / NAME)}; wait until it ends, stop it, or name "
                "another folder with --out."
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        yield
    finally:
        os.close(handle)


def holder(path: Path) -> str:
    """Return the holder of the lock, as far as it is known."""
    try:
        who = json.loads(path.read_text())
        return f" (process {who['pid']}, since {who['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
