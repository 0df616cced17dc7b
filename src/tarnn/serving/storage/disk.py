"""States on disk: a file for each, and an index that says which there are."""

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
from threading import RLock

from tarnn.data.tensor_file import flush, write_all
from tarnn.errors import UserError
from tarnn.serving.snapshot import Tokens
from tarnn.serving.state_info import UnfitState
from tarnn.serving.storage.ids import Hold, Holds
from tarnn.serving.storage.index import Index, is_sound, lock_folder, set_aside
from tarnn.serving.storage.packed import Packed, Packer
from tarnn.serving.storage.states import Entry, States

FILE = re.compile(r"([0-9a-f]{32})\.safetensors|\.[0-9a-f]{32}\.safetensors\.partial")
SLACK = 100  # one part in 100 of the bound is made free at once, so that not each new state has to wait for that
TRIES = 3  # if the disk is full before the store is
FULL = (errno.ENOSPC, errno.EDQUOT)
HOLD_BYTES, HOLD_OBJECTS = 300, 1000  # of an id in the index, measured, and in memory
ROOM, LOST = "it had to make room for others", "its file was lost"


class NoRoom(OSError):
    """The states on the disk may not go for this one."""


@dataclass(eq=False)
class Save:
    """A state to write. hold None: it may be lost with the machine's power, and goes for those that may not.

    outcome: its entry, once it is written, or what went wrong; done: the same, for threads that wait.
    """

    entry: Entry
    tokens: Tokens
    packed: Packed | None
    hold: Hold | None = None
    outcome: Entry | Exception | None = None
    done: Future[Entry] = field(default_factory=Future)


class Disk:
    """A folder of states, of which one store is the owner. One thread at a time calls what writes.

    bound: bytes of all files, the index among them, but for its log, which takes a few MB. states, holds: get what is in the
    folder; lock: of these. Raises UserError for a folder that can't be used, or that another server has.
    """

    def __init__(self, folder: Path, packer: Packer, bound: int, states: States, holds: Holds, lock: RLock):
        self._folder, self._packer, self.bound = folder, packer, bound
        self.states, self.holds, self._lock, self.evicted = states, holds, lock, 0
        self._file = lock_folder(folder)
        try:
            (folder / "states").mkdir(exist_ok=True)
            self._open()
            self._clean()
        except (OSError, sqlite3.Error) as error:
            os.close(self._file)
            raise UserError(
                f"states can't be kept in {folder}: {error}. Give another folder, or make this one sound."
            ) from error

    def close(self) -> None:
        self.index.close()
        os.close(self._file)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, the index among them."""
        return self.states.file_bytes + self.index.size()

    def load(self, entry: Entry, tokens: Tokens) -> Packed:
        """Read a state, if its file is what was written, of these tokens and this owner. Raises UnfitState, OSError."""
        path, size, source = self._path(entry.file), entry.bytes, f"the state of {len(tokens):,} tokens on disk"
        if not path.is_file() or path.stat().st_size != size:
            raise UnfitState(f"{source} is damaged: its file is not one of {size:,} bytes.")
        return self._packer.decode(path.read_bytes(), source, tokens, entry.owner)[0]

    def save(self, jobs: list[Save]) -> None:
        """Write states, and then the index, once for all of them; then they are durable, and have an outcome."""
        files: dict[Save, str] = {}
        rows: dict[Entry, tuple[int, str, int]] = {}
        try:
            for job in jobs:
                if (name := self._written(job)) is not None:
                    files[job] = name
            for folder in {self._path(name).parent for job, name in files.items() if job.hold is not None}:
                flush(folder)
            with self.index.change():
                for job, name in files.items():
                    job.outcome = self._enter(job, name, rows)
        except (OSError, sqlite3.Error) as error:
            for job in jobs:
                job.outcome = error if isinstance(job.outcome, Entry | None) else job.outcome
            rows.clear()
        with self._lock:
            for entry, row in rows.items():
                self.states.save(entry, *row)
            for job in jobs:
                if job.hold is not None and job.outcome is job.entry:
                    self._bind(job.hold, job.entry)
        for job, name in files.items():
            if name != job.entry.file:
                self._unlink(name)

    def remove(self, entry: Entry, why: str) -> None:
        """Remove a state; why: for clients that have an id for it."""
        with self.index.change():
            self.index.remove_state(entry.id, why)
        self._forget(entry, why)

    def add_hold(self, hold: Hold, entry: Entry) -> None:
        """Bind one more id to a state on disk. Raises sqlite3.IntegrityError if it, or its name, is taken."""
        with self.index.change():
            self.index.add_hold(hold, entry.id)
        with self._lock:
            self._bind(hold, entry)

    def _bind(self, hold: Hold, entry: Entry) -> None:
        hold.note_bytes, hold.note = len((hold.note or "").encode()), None
        self.holds.add(hold, entry)

    def remove_hold(self, hold: Hold, why: str = "") -> None:
        """Remove an id, and its state if that has no other. why: for the client; "" for none."""
        entry: Entry = hold.entry
        last = entry.holds == {hold} and entry.id
        with self.index.change():
            self.index.remove_hold(hold, why)
            if last:
                self.index.remove_state(entry.id, why)
        with self._lock:
            self.holds.remove(hold, why)
        if last:
            self._forget(entry, why)

    def _forget(self, entry: Entry, why: str) -> None:
        """Forget a state that the index knows no more."""
        file = entry.file
        with self._lock:
            for hold in list(entry.holds):
                if hold.saved or entry.packed is None:
                    self.holds.remove(hold, why)
            self.states.unsave(entry)
            if not why and entry.packed is not None and not entry.holds:
                self.states.unload(entry)
        self._unlink(file)

    def _written(self, job: Save) -> str | None:
        """Return the file of a job's state; None if it can't be written, which is the job's outcome."""
        try:
            known = job.entry.file
            if known and self._path(known).is_file():
                if job.hold is not None:
                    flush(self._path(known))
                return known
            if known:
                self.remove(job.entry, LOST)
            if job.packed is None:
                raise FileNotFoundError(errno.ENOENT, LOST)
            data = self._packer.encode(job.packed, job.tokens, job.entry.owner)
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
            flush(path.parent.parent)
        partial = path.with_name(f".{path.name}.partial")
        for tries in range(TRIES + 1):
            try:
                with open(partial, "wb", buffering=0) as file:
                    write_all(file, data)
                    if durable:
                        os.fsync(file.fileno())
                os.rename(partial, path)
                return name
            except OSError as error:
                partial.unlink(missing_ok=True)
                if error.errno not in FULL or tries == TRIES or not self._evict(len(data)):
                    raise
        raise AssertionError("the last try returns or raises")

    def _enter(self, job: Save, name: str, rows: dict[Entry, tuple[int, str, int]]) -> Entry | Exception:
        """Enter a job's state, and its hold. rows: number, file and size of each state that was entered."""
        entry = job.entry
        try:
            if not entry.id and entry not in rows:
                with self._lock:
                    node = entry.node.parent
                    while node is not None and (node.kept is None or not node.kept.id):
                        node = node.parent
                    tokens = entry.node.since(node).astype("<i4").tobytes()
                    above = None if node is None or node.kept is None else node.kept.id
                size = self._path(name).stat().st_size
                place = (entry.tree.model, entry.owner, above, tokens)
                rows[entry] = self.index.add_state(*place, name, size, time.time()), name, size
            if job.hold is not None:
                self.index.add_hold(job.hold, entry.id or rows[entry][0])
            return entry
        except (OSError, sqlite3.IntegrityError) as error:
            return error

    def _make_room(self, size: int, holder: str | None) -> None:
        """Make room for a new file within the bound. holder: a tenant whose state may push out held ones: of the tenant that
        has the most, so that none pushes out a state of one that has less."""
        while (surplus := self.nbytes + size - self.bound) > 0 or self._memory_is_full:
            surplus += self.bound // SLACK
            if not self._evict(surplus) and not (
                holder is not None and self._evict(surplus, self._largest(size, holder))
            ):
                raise NoRoom(
                    errno.ENOSPC, f"the store's bound of {self.bound:,} bytes leaves no room for {size:,} more"
                )

    @property
    def _memory_is_full(self) -> bool:
        """Return True if tokens and ids of what is on the disk take more memory than they may."""
        most = self.states.most_trees
        return most is not None and self.states.tree_bytes + HOLD_OBJECTS * len(self.holds) > most

    def _largest(self, size: int, holder: str) -> str:
        """Return the tenant that has the most, when this one has `size` bytes more."""
        shares = self.shares()
        shares[holder] = shares.get(holder, 0) + size
        return max(shares, key=shares.__getitem__)

    def shares(self) -> dict[str, int]:
        """Return the bytes of each tenant's states, of all models: of files, tokens, ids and notes."""
        with self._lock:
            shares = self.states.shares()
            for hold in self.holds.all():
                shares[hold.tenant] += HOLD_BYTES + hold.note_bytes
            return shares

    def _evict(self, surplus: int, held_by: str | None = None) -> bool:
        """Remove the least useful states, until `surplus` bytes are free. Return False if there was none to remove.

        held_by: a tenant whose held states may go; None: those that are not held.
        """
        with self._lock:
            states, evicted = self.states.least_used(held_by), []
        with self.index.change():
            for entry in states:
                self.index.remove_state(entry.id, ROOM)
                evicted.append(entry)
                surplus -= entry.bytes
                if surplus <= 0:
                    break
        for entry in evicted:
            self._forget(entry, ROOM)
        self.evicted += len(evicted)
        return bool(evicted)

    def _path(self, name: str) -> Path:
        return self._folder / "states" / name[:2] / f"{name}.safetensors"

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # gone, or a folder in its place: the index knows it no more
            self._path(name).unlink()

    def _open(self) -> None:
        """Open the index, and read it. A damaged one is set aside, with all files that nothing else knows."""
        path = self._folder / "index.sqlite"
        if not path.exists() or is_sound(path):
            try:
                self.index = Index(path, self._packer.key)
                return self._read()
            except sqlite3.NotSupportedError:
                raise
            except (sqlite3.DatabaseError, LookupError, TypeError, ValueError) as error:
                if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error):
                    raise
        set_aside(self._folder)
        self.index = Index(path, self._packer.key)
        self._read()

    def _read(self) -> None:
        try:
            self.index.read(self.states, self.holds)
        except BaseException:
            self.index.close()
            raise

    def _clean(self) -> None:
        """Delete files without a state, and states without a file."""
        files, found = {x.file for x in self.states.saved.values()}, set()
        for entry in (
            x for folder in os.scandir(self._folder / "states") if folder.is_dir() for x in os.scandir(folder)
        ):
            match = FILE.fullmatch(entry.name)
            if match and match[1] in files:
                found.add(match[1])
            elif match and not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
        for state in [x for x in self.states.saved.values() if x.file not in found]:
            self.remove(state, LOST)
