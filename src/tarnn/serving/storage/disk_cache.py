"""The disk behind the memory: states that are held there, found there, brought from there and sent there."""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from tarnn.serving.snapshot import Tokens
from tarnn.serving.state_info import StoreTrouble, UnfitState
from tarnn.serving.storage.disk import Disk, NoRoom, Save
from tarnn.serving.storage.ids import Hold, gone, taken
from tarnn.serving.storage.packed import CALLED, Packed, seal
from tarnn.serving.storage.states import Entry

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "its file was damaged"
TICK = 1.0  # seconds between two looks at what is due
MOST_AT_ONCE = 64  # states that one change of the index enters at most
BATCH = 16  # states that are written between two looks at the clock
LEAVING = 8  # one part in 8 of the memory is for states on their way to the disk
PAUSE = 10.0  # seconds after which a disk that could not be written is tried again
LATELY = 5.0  # seconds for which the index need not know that a state was used
PATIENCE = 5.0  # seconds for which a store that is closed writes what only memory had


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method: errors of SQLite, also about a damaged index, become StoreTrouble."""

    @wraps(method)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            return method(*args, **options)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreTrouble(
                f"the index of states can't be used: {error}. Ask again, or start the server anew."
            ) from error

    return run


class DiskCache:
    """A disk, with the one thread that writes to it, for a store whose lock this is.

    Ids whose states could not be written stay in memory, until they can. trouble: why they can't be; "" while all can. It is
    logged, too. expire: called by the thread now and then.
    """

    def __init__(self, disk: Disk, lock: threading.RLock, expire: Callable[[], None]):
        self.disk, self._states, self._holds = disk, disk.states, disk.holds
        self._lock, self._expire, self._trouble, self.damaged = lock, expire, "", 0
        self._states_used: set[Entry] = set()
        self._holds_used: set[Hold] = set()
        self._flushed, self._pause, self._leaving = time.time(), 0.0, 0
        self._most_leaving = self._states.bound // LEAVING
        self._states.bound -= self._most_leaving
        self._jobs: deque[Save] = deque()
        self._thread = ThreadPoolExecutor(1, "tarnn-states")
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="tarnn-states-clock", daemon=True)
        self._clock.start()

    @property
    def trouble(self) -> str:
        return self._trouble

    @trouble.setter
    def trouble(self, text: str) -> None:
        if text != self._trouble:
            LOG.error("tarnn: %s", f"{text}. Held states stay in memory" if text else "states are on the disk again")
        self._trouble = text

    @checked
    def check(self, hold: Hold, name: str) -> None:
        """Raise StateGone for a damaged state, UnfitState for one of another model."""
        if hold.entry.damaged:
            raise gone(name, DAMAGED)
        if hold.model == self._holds.model:
            return
        key, other = self.disk.index.key(self._holds.model), self.disk.index.key(hold.model)
        if other.fingerprint != key.fingerprint and other.products == key.products:
            raise UnfitState(f"state {name!r} belongs to another model: other weights, or another config.")
        differ = [f"{CALLED[x]} {getattr(other, x)}" for x in CALLED if getattr(other, x) != getattr(key, x)]
        raise UnfitState(f"state {name!r} was made with {' and '.join(differ)}; this server has others.")

    @checked
    def note(self, hold: Hold) -> str:
        """Return the note of an id, from the index if it is there."""
        return self.disk.index.note(hold) if hold.note is None else hold.note

    @property
    def size(self) -> tuple[int, str]:
        """Return the bytes on disk, and the trouble."""
        try:
            return self.disk.nbytes, self.trouble
        except sqlite3.Error as error:
            return 0, f"the index of states can't be read: {error}"

    def used(self, entry: Entry, hold: Hold | None = None) -> None:
        """Note that a state was used now; the index learns it later."""
        with self._lock:
            self._states.touch(entry)
            self._states_used.add(entry)
            if hold is not None:
                hold.used = entry.used
                self._holds_used.add(hold)

    def load(self, entry: Entry, tokens: Tokens, name: str = "") -> Packed:
        """Read a state. Raises OSError, and StateGone, by this name, for one that is damaged or has just gone."""
        try:
            return self.disk.load(entry, tokens)
        except UnfitState as error:
            with self._lock:
                if entry.id and not entry.damaged:
                    entry.damaged = True
                    self.damaged += 1
                    self._thread.submit(self.disk.remove, entry, DAMAGED)
            raise gone(name, DAMAGED) from error

    def hold(self, entry: Entry, tokens: Tokens, packed: Packed, hold: Hold) -> None:
        """Write a state with an id; both are durable then. Raises NameTaken, and OSError or sqlite3.Error if it can't be."""
        hold.seal = seal(hold.tenant, hold.id, tokens)
        try:
            self._submit(Save(entry, tokens, packed, hold)).result()
        except sqlite3.IntegrityError as error:
            raise taken(hold.name or hold.id) from error

    @checked
    def fork(self, hold: Hold, fork: Hold, tokens: Tokens) -> None:
        """Bind another id to a held state."""
        fork.seal = seal(fork.tenant, fork.id, tokens)
        try:
            self._thread.submit(self.disk.add_hold, fork, hold.entry).result()
        except sqlite3.IntegrityError as error:
            raise taken(fork.name or fork.id) from error

    @checked
    def remove_hold(self, hold: Hold) -> None:
        """Remove an id, and its state if that has no other; durably."""
        self._thread.submit(self.disk.remove_hold, hold).result()

    def spill(self, entry: Entry) -> None:
        """Send a state that leaves memory to the disk, if that keeps pace; do not wait."""
        size, late = entry.nbytes, time.monotonic() < self._pause
        if entry.id or self._leaving + size > self._most_leaving or late or self._states.trees_are_full:
            return
        self._leaving += size
        self._submit(Save(entry, entry.tokens, entry.packed)).add_done_callback(partial(self._left, size))

    def close(self) -> None:
        """Write what only memory has, for some seconds at most, and what the index need not have known before."""
        self.settle()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._thread.submit(self._save_some).result():
            pass
        with suppress(sqlite3.Error):  # only when states were last used is lost with it
            self._thread.submit(self._flush).result()
        self.abandon()

    def settle(self) -> None:
        """Wait until all tasks so far are done, and held states are on the disk if they can be."""
        self._thread.submit(self._bring_all).result()

    def abandon(self) -> None:
        """Let go of the folder, without what only memory has."""
        self._closing.set()
        self._thread.shutdown()
        self.disk.close()

    def _submit(self, job: Save) -> Future[Entry]:
        with self._lock:
            job.entry.writes += 1
        self._jobs.append(job)
        self._thread.submit(self._save_next)
        return job.done

    def _save_next(self) -> None:
        """Save the next jobs, all in one change of the index: later calls find fewer, or none."""
        if jobs := [self._jobs.popleft() for _ in range(min(MOST_AT_ONCE, len(self._jobs)))]:
            self._save(jobs)

    def _save(self, jobs: list[Save]) -> None:
        try:
            self.disk.save(jobs)
        except Exception as error:  # a thread that dies would let all others wait forever
            for job in jobs:
                job.outcome = error
        with self._lock:
            for job in jobs:
                job.entry.writes -= 1
                self._states.release(job.entry)
        errors = [job.outcome for job in jobs if isinstance(job.outcome, Exception)]
        serious = [error for error in errors if not isinstance(error, sqlite3.IntegrityError | NoRoom)]
        if serious:
            self.trouble, self._pause = f"states can't be written to the disk: {serious[0]}", time.monotonic() + PAUSE
        elif len(errors) < len(jobs):
            self.trouble, self._pause = "", 0.0
        for job in jobs:  # after that, so that a thread that waited finds it in `stats`
            if isinstance(job.outcome, Exception):
                job.done.set_exception(job.outcome)
            else:
                job.done.set_result(job.entry)

    def _tick(self) -> None:
        while not self._closing.wait(TICK):
            with suppress(RuntimeError):  # it was closed now
                self._thread.submit(self._due)

    def _due(self) -> None:
        now = time.time()
        try:
            if now - self._flushed > LATELY:
                self._flush()
                self._expire()
            if time.monotonic() >= self._pause:
                self._bring_all()
        except (OSError, sqlite3.Error) as error:
            self.trouble, self._pause = f"states can't be written to the disk: {error}", time.monotonic() + PAUSE

    def _flush(self) -> None:
        self._flushed = time.time()
        with self._lock:
            states, self._states_used = [(x.used, x.id) for x in self._states_used], set()
            holds, self._holds_used = [(x.used, x.tenant, x.id) for x in self._holds_used], set()
        if states or holds:
            with self.disk.index.change():
                self.disk.index.touch(states, holds)

    def _bring_all(self) -> None:
        """Write held states that could not be written before."""
        with self._lock:
            holds = [x for x in self._holds.all() if not x.saved]
            jobs = [Save(x.entry, x.entry.tokens, x.entry.packed, x) for x in holds]
            for job in jobs:
                job.entry.writes += 1
        for hold, job in zip(holds, jobs):
            hold.seal = seal(hold.tenant, hold.id, job.tokens)
        if jobs:
            self._save(jobs)

    def _save_some(self) -> bool:
        """Write some of the states that only memory has, the most useful first; return whether any was written."""
        with self._lock:
            unsaved = (x for x in self._states.loaded if not (x.id or x.holds))
            entries = sorted(unsaved, key=self._states.worth, reverse=True)[:BATCH]
            jobs = [Save(x, x.tokens, x.packed) for x in entries]
            for job in jobs:
                job.entry.writes += 1
        self._save(jobs)
        return any(x.done.exception() is None for x in jobs)

    def _left(self, size: int, _: object) -> None:
        with self._lock:
            self._leaving -= size
