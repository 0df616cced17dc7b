"""The disk beside the memory: what is held there, found there, brought from there and sent there."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from tarnn.serving.state_info import StateGone, StoreTrouble, UnfitState
from tarnn.serving.storage.disk import Disk, NoRoom, Save
from tarnn.serving.storage.holds import Holds, gone, taken, unknown, unused
from tarnn.serving.storage.index import HoldRow, NewHold, StateRow
from tarnn.serving.storage.memory import Entry, Memory
from tarnn.serving.storage.packed import CALLED, Packed, seal
from tarnn.serving.storage.tree import Tokens
from tarnn.serving.storage.writer import Writer

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "its file was damaged"
BATCH = 16  # states that are written between two looks at the clock
LEAVING = 8  # of the memory is for states on their way to the disk: one part of so many
PAUSE = 10.0  # seconds after which a disk that could not be written is tried again
LATELY = 5.0  # seconds for which the index need not know that a state was of use
PATIENCE = 5.0  # seconds for which a store that is closed writes what only memory had


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """The method, with errors of SQLite, also about a damaged index, as StoreTrouble."""

    @wraps(method)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            return method(*args, **options)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreTrouble(
                f"the index of states can't be used: {error}. Ask again, or start the server anew."
            ) from error

    return run


class Saved:
    """States on the disk, for a store whose memory and lock are these.

    parked: what should be on the disk, and could not be written. trouble: why not; "" while all can be. The log is told of it.
    """

    def __init__(self, disk: Disk, memory: Memory, parked: Holds, lock: threading.RLock, ttl: float | None):
        self.disk, self._trouble, self.damaged = disk, "", 0
        self._memory, self._parked, self._lock, self._ttl = memory, parked, lock, ttl
        self._bad: set[int] = set()
        self._states_used: dict[int, float] = {}
        self._holds_used: dict[tuple[str, str], float] = {}
        self._flushed, self._pause, self._leaving = time.time(), 0.0, 0
        self._most_leaving = memory.bound // LEAVING
        memory.bound -= self._most_leaving
        self._writer = Writer(self._save, self._due)

    @property
    def trouble(self) -> str:
        return self._trouble

    @trouble.setter
    def trouble(self, text: str) -> None:
        if text != self._trouble:
            LOG.error("tarnn: %s", f"{text}. Held states stay in memory" if text else "states are on the disk again")
        self._trouble = text

    @checked
    def find(self, tenant: str, id_or_name: str) -> HoldRow:
        """Raises UnknownState, StateGone, and UnfitState for a state of another model."""
        row = self.disk.reading.hold(tenant, id_or_name)
        if row is None:
            raise unknown(id_or_name)
        if row.state is None or row.state in self._bad:
            raise gone(id_or_name, row.gone or DAMAGED)
        if row.model != self.disk.reading.model:
            raise self._of_another_model(id_or_name, row.model)
        if self._ttl is not None and self._unused(tenant, row) > self._ttl:
            raise gone(id_or_name, unused(self._ttl))
        return row

    @checked
    def of(self, tenant: str) -> list[HoldRow]:
        """All that are not gone."""
        rows = [row for row in self.disk.reading.holds(tenant) if row.state not in self._bad]
        return rows if self._ttl is None else [row for row in rows if self._unused(tenant, row) <= self._ttl]

    @property
    def stats(self) -> tuple[int, int, int, int, int, int, str]:
        """States, bytes, ids, the bound, how many states made room and were damaged, and what the trouble is."""
        try:
            sizes, trouble = self.disk.reading.sizes(), self.trouble
        except sqlite3.Error as error:
            sizes, trouble = (0, 0, 0), f"the index of states can't be read: {error}"
        return *sizes, self.disk.bound, self.disk.evicted, self.damaged, trouble

    def used(self, state: int, *hold: tuple[str, str]) -> None:
        """It was of use now; the index is told later."""
        with self._lock:
            self._states_used[state] = now = time.time()
            self._holds_used.update(dict.fromkeys(hold, now))

    @checked
    def get(self, tenant: str, row: HoldRow) -> tuple[Packed, Tokens, str, int]:
        """What the id means, its tokens, whose tree it is in, and its number where it had to be read from the disk, or 0."""
        assert row.state is not None  # find gave it
        self.used(row.state, (tenant, row.id))
        with self._lock:
            entry = self._memory.saved.get(row.state)
            if entry is not None:
                self._memory.touch(entry)
                packed, tokens, owner, number = entry.packed, entry.node.sequence(), entry.owner, 0
        if entry is None:
            state = self.disk.reading.state(row.state)
            if state is None:
                raise gone(row.id, self.find(tenant, row.id).gone)
            tokens = self.disk.reading.sequence(state.node)
            packed, owner, number = self._load(state, tokens, row.id), state.owner, state.id
        if owner.partition("/")[2] != tenant or row.seal != seal(tenant, row.id, tokens):
            raise gone(row.id, DAMAGED)
        return packed, tokens, owner, number

    def longest(self, owner: str, tokens: Tokens, above: int, beyond: int) -> tuple[StateRow, Packed] | None:
        """The state after the longest beginning of these tokens that is longer than `beyond`. above: as in the index; 0: none."""
        try:
            for row in self.disk.finding.longest(owner, tokens, above or None):
                if row.end <= beyond:
                    return None
                if row.id not in self._bad and row.owner == owner:
                    try:
                        packed = self._load(row, tokens[: row.end], "")
                    except StateGone:
                        continue
                    self.used(row.id)
                    return row, packed
        except (OSError, sqlite3.Error, ValueError) as error:
            self.trouble = f"states on disk can't be read: {error}"
        return None

    def hold(self, owner: str, tokens: Tokens, packed: Packed, hold: NewHold) -> StateRow:
        """The row of a state that has an id now, durable. Raises NameTaken, and OSError or sqlite3.Error where that can't be."""
        try:
            return self._writer.save(Save(owner, tokens, packed, hold)).result()
        except sqlite3.IntegrityError as error:
            raise taken(hold.name or hold.id) from error

    @checked
    def fork(self, tenant: str, row: HoldRow, fork: NewHold) -> None:
        _, tokens, _, _ = self.get(tenant, row)
        assert row.state is not None  # find gave it
        task = partial(self.disk.writing.add_hold, fork, seal(tenant, fork.id, tokens), row.bytes, row.state)
        try:
            self._writer.call(task).result()
        except sqlite3.IntegrityError as error:
            raise taken(fork.name or fork.id) from error

    @checked
    def delete(self, tenant: str, row: HoldRow) -> None:
        self._writer.call(partial(self.disk.remove_hold, tenant, row.id)).result()
        assert row.state is not None  # find gave it
        if self.disk.reading.state(row.state) is None:
            with self._lock:
                if (entry := self._memory.saved.get(row.state)) is not None:
                    self._memory.drop(entry)

    def spill(self, entry: Entry) -> None:
        """A state that has to leave memory goes to the disk, if that keeps pace; nobody waits."""
        if entry.saved or self._leaving + entry.nbytes > self._most_leaving or time.monotonic() < self._pause:
            return
        job = Save(entry.owner, entry.node.sequence(), entry.packed)
        self._leaving += entry.nbytes
        job.done.add_done_callback(partial(self._left, entry.nbytes))
        self._writer.save(job)

    def close(self) -> None:
        """Write what only memory has, as far as that takes no time worth a mention, and what is owed to the index."""
        self._writer.call(self._bring_all).result()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._writer.call(self._save_some).result():
            pass
        with suppress(sqlite3.Error):  # only when states were last used is lost with it
            self._writer.call(self._flush).result()
        self._writer.close()
        self.disk.close()

    def _load(self, row: StateRow, tokens: Tokens, name: str) -> Packed:
        try:
            return self.disk.load(row, tokens)
        except UnfitState as error:
            if self.disk.reading.state(row.id) is not None:
                self._bad.add(row.id)
                self.damaged += 1
                self._writer.call(partial(self.disk.forget, row.id, DAMAGED))
            raise gone(name, DAMAGED) from error

    def _save(self, jobs: list[Save]) -> None:
        self.disk.save(jobs)
        errors = [job.outcome for job in jobs if isinstance(job.outcome, Exception)]
        told = [error for error in errors if not isinstance(error, sqlite3.IntegrityError | LookupError | NoRoom)]
        if told:
            self.trouble, self._pause = f"states can't be written to the disk: {told[0]}", time.monotonic() + PAUSE
        elif len(errors) < len(jobs):
            self.trouble, self._pause = "", 0.0
        for job in jobs:  # after that, so that whoever waited finds it in `stats`
            if isinstance(job.outcome, StateRow):
                job.done.set_result(job.outcome)
            else:
                job.done.set_exception(job.outcome)

    def _due(self) -> None:
        """What the writer's thread does between its tasks."""
        now = time.time()
        try:
            if now - self._flushed > LATELY:
                self._flush()
                self._expire(now)
            if time.monotonic() >= self._pause:
                self._bring_all()
        except (OSError, sqlite3.Error) as error:
            self.trouble, self._pause = f"states can't be written to the disk: {error}", time.monotonic() + PAUSE

    def _unused(self, tenant: str, row: HoldRow) -> float:
        """For how many seconds nobody has used it."""
        return time.time() - max(row.used, self._holds_used.get((tenant, row.id), 0))

    def _flush(self) -> None:
        self._flushed = time.time()
        with self._lock:
            states, self._states_used = self._states_used, {}
            holds, self._holds_used = self._holds_used, {}
        if states or holds:
            self.disk.writing.touch(states, holds)

    def _expire(self, now: float) -> None:
        if self._ttl is not None:
            for tenant, id in self.disk.writing.expired(now - self._ttl):
                self.disk.remove_hold(tenant, id, unused(self._ttl))

    def _bring_all(self) -> None:
        """States that had to be parked in memory go to the disk, where they were meant to be."""
        with self._lock:
            holds = [x for x in self._parked.all() if x.entry.node.kept is x.entry]
            jobs = {x: Save(x.entry.owner, x.entry.node.sequence(), x.entry.packed, x.new) for x in holds}
        for hold, job in jobs.items():
            self._save([job])
            if job.done.exception() is not None:
                return
            with self._lock:
                if (hold.tenant, hold.id) in hold.entry.holds:
                    self._parked.remove(hold)
                    self._memory.save(hold.entry, job.done.result().id)

    def _left(self, size: int, _: object) -> None:
        with self._lock:
            self._leaving -= size

    def _save_some(self) -> bool:
        """Write some of the states that only memory has, the most useful first; whether there were any, and they could be."""
        with self._lock:
            entries = self._memory.most_unsaved(BATCH)
            jobs = {x: Save(x.owner, x.node.sequence(), x.packed) for x in entries}
        self._save(list(jobs.values()))
        saved = [(entry, job) for entry, job in jobs.items() if job.done.exception() is None]
        with self._lock:
            for entry, job in saved:
                if entry.node.kept is entry:
                    self._memory.save(entry, job.done.result().id)
        return bool(saved)

    def _of_another_model(self, name: str, model: int) -> UnfitState:
        other, ours = self.disk.reading.key(model), self.disk.reading.key(self.disk.reading.model)
        if other.fingerprint != ours.fingerprint:
            return UnfitState(f"state {name!r} belongs to another model: other weights, or another config.")
        differ = [f"{CALLED[x]} {getattr(other, x)}" for x in CALLED if getattr(other, x) != getattr(ours, x)]
        return UnfitState(f"state {name!r} was made with {' and '.join(differ)}; this server has others.")
