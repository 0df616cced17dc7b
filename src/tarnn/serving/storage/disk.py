"""States on disk: a file for each, and the index that says which there are."""

import errno
import os
import re
import secrets
import sqlite3
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tarnn.data.tensor_file import flush, write_all
from tarnn.errors import UserError
from tarnn.serving.state_info import UnfitState
from tarnn.serving.storage.index import Index, NewHold, StateRow
from tarnn.serving.storage.lock import lock_folder
from tarnn.serving.storage.packed import Packed, Packer, seal
from tarnn.serving.storage.tree import Tokens

FILE = re.compile(r"([0-9a-f]{32})\.safetensors|\.[0-9a-f]{32}\.safetensors\.partial")
SAMPLE = 64  # of how many states the least useful ones go
SLACK = 100  # one part in so many of the bound is made free at once, so that not each new state has to wait for that
TRIES = 3  # where the disk is full before the store is
FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """All states on the disk are such as may not go for this one."""


@dataclass(eq=False)
class Save:
    """A state to be written. hold None: it may be lost with the machine's power, and goes for those that may not.

    outcome: its row, once it is there, or what went wrong; done: the same, for whoever waits.
    """

    owner: str
    tokens: Tokens
    packed: Packed
    hold: NewHold | None = None
    outcome: StateRow | Exception | None = None
    done: Future[StateRow] = field(default_factory=Future)


class Disk:
    """A folder of states. All methods may be called by any thread, those that write by one at a time.

    finding, reading, writing: connections to its index, of which the first is for whoever can't wait for long lists.

    bound: bytes of all files, the index among them, but for its log, which takes a few MB. Raises UserError for a
    folder that can't be used, or that another server has.
    """

    def __init__(self, folder: Path, packer: Packer, bound: int):
        self._folder, self._packer, self.bound = folder, packer, bound
        self._lock = lock_folder(folder)
        self.evicted = 0
        try:
            self._make_sound()
            self._states.mkdir(exist_ok=True)
            path = self._folder / "index.sqlite"
            self.finding, self.reading, self.writing = (Index(path, packer.key) for _ in range(3))
            self._clean()
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise UserError(
                f"states can't be kept in {folder}: {error}. Give another folder, or make this one sound."
            ) from error

    def close(self) -> None:
        self.finding.close()
        self.reading.close()
        self.writing.close()
        os.close(self._lock)

    def load(self, row: StateRow, tokens: Tokens) -> Packed:
        """What the file says, if it is what was written, of these tokens and this row's owner. Raises UnfitState, OSError."""
        path, source = self._path(row.file), f"the state of {row.end:,} tokens on disk"
        if not path.is_file() or path.stat().st_size != row.bytes:
            raise UnfitState(f"{source} is damaged: its file is not one of {row.bytes:,} bytes.")
        return self._packer.decode(path.read_bytes(), source, tokens, row.owner)[0]

    def save(self, jobs: list[Save]) -> None:
        """Write states, and then the index, once for all of them; then they are durable, and have an outcome."""
        written: dict[Save, str] = {}
        try:
            written = {job: name for job in jobs if (name := self._written(job)) is not None}
            for folder in {self._path(name).parent for job, name in written.items() if job.hold is not None}:
                flush(folder)
            with self.writing.change():
                rows = {job: self._entered(job, name) for job, name in written.items()}
        except (OSError, sqlite3.Error) as error:
            for job in jobs:
                job.outcome = job.outcome or error
            for name in written.values():
                self._unlink_unknown(name)
            return
        for job, row in rows.items():
            if isinstance(row, Exception):
                job.outcome = row
                self._unlink_unknown(written[job])
            else:
                if row.file != written[job]:
                    self._unlink(written[job])
                job.outcome = row

    def forget(self, state: int, why: str) -> None:
        """The state is gone; why: what those are told who have an id for it."""
        self._unlink(self.writing.forget(state, why))

    def remove_hold(self, tenant: str, id: str, why: str = "") -> None:
        """The id means nothing any more; its state goes with it unless another id means it. why: as in `forget`."""
        self._unlink(self.writing.remove_hold(tenant, id, why))

    def _written(self, job: Save) -> str | None:
        """The file of a job's state; None where it can't be written, which the job is told."""
        try:
            known = next(self.writing.longest(job.owner, job.tokens), None)
            if known is not None and known.end == len(job.tokens) and self._path(known.file).is_file():
                if job.hold is not None:
                    flush(self._path(known.file))
                return known.file
            data = self._packer.encode(job.packed, job.tokens, job.owner)
            self._make_room(len(data) + job.tokens.nbytes, None if job.hold is None else job.hold.tenant)
            return self._write(data, durable=job.hold is not None)
        except (OSError, sqlite3.Error) as error:
            job.outcome = error
            return None

    def _write(self, data: bytes, *, durable: bool) -> str:
        name = secrets.token_hex(16)
        path = self._path(name)
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            flush(self._states)
        beside = path.with_name(f".{path.name}.partial")
        for tries in range(TRIES + 1):
            try:
                with open(beside, "wb", buffering=0) as file:
                    write_all(file, data)
                    if durable:
                        os.fsync(file.fileno())
                os.rename(beside, path)
                return name
            except OSError as error:
                beside.unlink(missing_ok=True)
                if error.errno not in FULL or tries == TRIES or not self._evict(len(data)):
                    raise
        raise AssertionError("the last try returns or raises")

    def _entered(self, job: Save, name: str) -> StateRow | Exception:
        """The row of a job's state, and of its hold, in a transaction that has begun."""
        try:
            row = self.writing.put(job.owner, job.tokens, name, self._path(name).stat().st_size)
            if job.hold is not None:
                own = seal(job.hold.tenant, job.hold.id, job.tokens)
                self.writing.add_hold(job.hold, own, job.packed.nbytes, row.id)
            return row
        except (LookupError, OSError, sqlite3.IntegrityError) as error:
            return error

    def _make_room(self, size: int, holder: str | None) -> None:
        """Room for a new file within the bound. holder: of one that may push out others that are held: of those who have the
        most, so that nobody pushes out a state of somebody who has less."""
        while (surplus := self.writing.sizes()[1] + size - self.bound) > 0:
            surplus += self.bound // SLACK
            if not self._evict(surplus) and not (
                holder is not None and self._evict(surplus, self._largest(size, holder))
            ):
                raise NoRoom(
                    errno.ENOSPC, f"the store's bound of {self.bound:,} bytes leaves no room for {size:,} more"
                )

    def _largest(self, size: int, holder: str) -> str:
        """Who has the most, when this one has so many bytes more."""
        shares = self.writing.shares()
        shares[holder] = shares.get(holder, 0) + size
        return max(shares, key=shares.__getitem__)

    def _evict(self, surplus: int, held_by: str | None = None) -> bool:
        """Let the least useful states go, until there are so many bytes less. False where there is none to go.

        held_by: those of this tenant's that are held; None: those that nobody holds.
        """
        names = []
        with self.writing.change():
            for row in self.writing.least(SAMPLE, held_by=held_by):
                names.append(self.writing.forget(row.id, "it had to make room for others"))
                surplus -= row.bytes
                if surplus <= 0:
                    break
        for name in names:
            self._unlink(name)
        self.evicted += len(names)
        return bool(names)

    @property
    def _states(self) -> Path:
        return self._folder / "states"

    def _path(self, name: str) -> Path:
        return self._states / name[:2] / f"{name}.safetensors"

    def _unlink(self, name: str | None) -> None:
        if name is not None:
            with suppress(OSError):  # gone, or a folder in its place: the index knows it no more
                self._path(name).unlink()

    def _unlink_unknown(self, name: str) -> None:
        try:
            known = name in self.writing.files()
        except sqlite3.Error:
            return  # the next start cleans up
        if not known:
            self._unlink(name)

    def _make_sound(self) -> None:
        """Set a damaged index aside, with all files that nothing else knows; nothing is deleted, and the store begins anew."""
        path = self._folder / "index.sqlite"
        if not path.exists() or is_sound(path):
            return
        aside = self._folder / f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        aside.mkdir()
        for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "states"):
            if (self._folder / name).exists():
                os.rename(self._folder / name, aside / name)

    def _clean(self) -> None:
        """Files without a row are deleted, and rows without a file."""
        known, there = self.writing.files(), set()
        for entry in (x for folder in os.scandir(self._states) if folder.is_dir() for x in os.scandir(folder)):
            match = FILE.fullmatch(entry.name)
            if match and match[1] in known:
                there.add(match[1])
            elif match and not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
        for name in known - there:
            self.writing.forget_file(name, "its file was lost")


def is_sound(path: Path) -> bool:
    """Whether this is a SQLite database as SQLite left it. Raises sqlite3.OperationalError where it can't be read."""
    if not path.is_file():
        return False
    db = sqlite3.connect(path)
    try:
        return db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    except sqlite3.OperationalError:
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return False
    finally:
        db.close()
