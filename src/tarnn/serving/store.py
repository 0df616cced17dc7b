"""Where states are kept: found by the tokens that they have seen, or held under an id that a client was given."""

import builtins
import secrets
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np

from tarnn.serving.model import ServedModel
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.state_info import StateInfo, StoreFull, StoreStats, UnknownState
from tarnn.serving.storage.disk import Disk
from tarnn.serving.storage.holds import Hold, Holds, check_name, new_id, taken, unused
from tarnn.serving.storage.index import HoldRow
from tarnn.serving.storage.memory import Entry, Memory
from tarnn.serving.storage.packed import Packed, Packer
from tarnn.serving.storage.saved import Saved
from tarnn.serving.storage.tree import Tokens


class StateStore:
    """The states of one model, of any number of tenants, who share nothing.

        store = StateStore(model, folder=Path("states"))
        store.keep(tenant, snapshot)                  # found by its tokens until something more useful needs the room
        snapshot = store.longest(tenant, tokens)      # after the longest beginning of these tokens; or None
        info = store.hold(tenant, snapshot)           # has an id, and stays: it is on the disk when this returns
        snapshot = store.get(tenant, info.id)         # to the bit what was put

    memory: bytes at most. folder: where states outlive the server; None: nowhere. It may be that of other models too.
    disk: bytes that all of it takes at most. ttl: seconds after its last use when a held state goes; None: never.

    Any number of threads may use one store. `longest` and `keep` wait for no write to the disk. Methods that take an id or a
    name raise UnknownState where it means nothing, StateGone where it did, and UnfitState for a state of another model.
    Raises UserError for a folder that can't be used, or that another server has.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        memory: int = 2**30,
        folder: Path | None = None,
        disk: int = 20 * 2**30,
        ttl: float | None = None,
    ):
        self._packer, self._ttl = Packer(model), ttl
        self._memory, self._parked, self._lock = Memory(memory), Holds(), threading.RLock()
        self._hits = self._misses = self._hit_tokens = 0
        self._saved: Saved | None = None
        self._closed, self._expired = False, 0.0
        if folder is not None:
            self._saved = Saved(Disk(folder, self._packer, disk), self._memory, self._parked, self._lock, ttl)

    def longest(self, tenant: str, tokens: Tokens) -> Snapshot | None:
        """The state after the longest beginning of these tokens, all of them at most, that is kept for this tenant."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        with self._lock:
            entry = self._memory.longest(mine(tenant), tokens)
            packed, length, above = (entry.packed, entry.node.end, entry.saved) if entry is not None else (None, -1, 0)
            if entry is not None:
                self._memory.touch(entry)
                if self._saved is not None and entry.saved:
                    self._saved.used(entry.saved)
        if self._saved is not None and length < len(tokens):
            better = self._saved.longest(mine(tenant), tokens, above, length)
            if better is not None:
                row, packed = better
                length = row.end
                self._put(mine(tenant), tokens[:length], packed, saved=row.id)
        with self._lock:
            if packed is None:
                self._misses += 1
                return None
            self._hits += 1
            self._hit_tokens += length
        return self._packer.unpack(packed, tokens[:length].copy())

    def keep(self, tenant: str, snapshot: Snapshot) -> None:
        """Keep a state for whoever reads the same beginning again, until something more useful needs the room.

        Raises UnfitState for a snapshot of another model. One that is larger than the store is not kept, nor one that is not
        proven to be the state after its tokens.
        """
        if snapshot.proven:
            packed, tokens = self._packer.pack(snapshot), np.ascontiguousarray(snapshot.tokens, np.int32)
            self._put(mine(tenant), tokens, packed)

    def hold(
        self,
        tenant: str,
        snapshot: Snapshot,
        *,
        id: str | None = None,
        name: str | None = None,
        parent: str | None = None,
        note: str = "",
    ) -> StateInfo:
        """Keep a state under an id, this one or a new one, and a name, if it shall have one.

        note: a text that goes with it, for whoever asks `info`.

        Where the disk can't be written it is parked in memory: so says `where` of what is returned, and `stats.trouble` why.
        Raises as `keep` does, NameTaken, ValueError for a name that is none, and StoreFull where there is no room at all.
        """
        packed, tokens = self._packer.pack(snapshot), np.ascontiguousarray(snapshot.tokens, np.int32)
        return self._hold(
            owner_of(tenant, snapshot.proven), tokens, packed, Hold(tenant, id or new_id(), name, parent, note)
        )

    def get(self, tenant: str, id_or_name: str) -> Snapshot:
        """A held state."""
        packed, tokens, owner = self._use(tenant, id_or_name)
        return self._packer.unpack(packed, tokens, proven=owner == mine(tenant))

    def info(self, tenant: str, id_or_name: str) -> StateInfo:
        """What is known of a held state."""
        return info_of(self._find(tenant, id_or_name))

    def list(self, tenant: str) -> builtins.list[StateInfo]:
        """All that this tenant holds, oldest first."""
        with self._lock:
            self._expire()
            infos = [hold.info for hold in self._parked.of(tenant)]
        if self._saved is not None:
            infos += [info_of(row) for row in self._saved.of(tenant)]
        return sorted(infos, key=lambda info: info.created)

    def fork(self, tenant: str, id_or_name: str, name: str | None = None) -> StateInfo:
        """Another id for the same state, which goes on by itself. Nothing is copied."""
        hold = self._find(tenant, id_or_name)
        fork = Hold(tenant, new_id(), name, hold.id)
        self._check_free(fork)
        if isinstance(hold, HoldRow):
            assert self._saved is not None  # there are rows
            self._saved.fork(tenant, hold, fork.new)
            return fork.info_of(hold.tokens, hold.bytes, "disk")
        with self._lock:
            self._parked.add(fork, hold.entry)
            return fork.info

    def delete(self, tenant: str, id_or_name: str) -> None:
        """The id means nothing any more, and its state goes with it unless another id means it too."""
        hold = self._find(tenant, id_or_name)
        if isinstance(hold, HoldRow):
            assert self._saved is not None  # there are rows
            self._saved.delete(tenant, hold)
            return
        with self._lock:
            self._let_go(hold)

    def export(self, tenant: str, id_or_name: str) -> bytes:
        """A held state as a file, which `add` takes, here or on another server, and `tarnn generate --state-in` too."""
        packed, tokens, _ = self._use(tenant, id_or_name)
        return self._packer.encode(packed, tokens)

    def add(self, tenant: str, data: bytes, name: str | None = None) -> StateInfo:
        """Hold a state that `export` gave. Raises UnfitState for anything else, and as `hold` does.

        It is found by its id alone, not by its tokens, and neither is what goes on from it: nobody here has seen that it is the
        state after them.
        """
        check_name(name)
        packed, tokens = self._packer.decode(data, "the uploaded file")
        return self._hold(owner_of(tenant, False), tokens, packed, Hold(tenant, new_id(), name))

    @property
    def stats(self) -> StoreStats:
        """How full it is, and how often it helped."""
        count, size, held, bound, evicted, damaged, trouble = (
            (0, 0, 0, 0, 0, 0, "") if self._saved is None else self._saved.stats
        )
        with self._lock:
            memory = self._memory
            sizes = (len(memory.entries), memory.nbytes, memory.bound, count, size, bound, len(self._parked) + held)
            counts = (self._hits, self._misses, self._hit_tokens, memory.evicted + evicted, damaged)
        return StoreStats(*sizes, *counts, trouble)

    def close(self) -> None:
        """Write to the disk what only memory has, for some seconds at most, and let others have the folder."""
        if self._saved is not None and not self._closed:
            self._closed = True
            self._saved.close()

    def _hold(self, owner: str, tokens: Tokens, packed: Packed, hold: Hold) -> StateInfo:
        self._check_free(hold)
        trouble = "there is no folder for states"
        if self._saved is not None:
            try:
                row = self._saved.hold(owner, tokens, packed, hold.new)
            except (OSError, LookupError, sqlite3.Error) as error:
                trouble = str(error)
            else:
                self._put(owner, tokens, packed, saved=row.id)
                return hold.info_of(len(tokens), packed.nbytes, "disk")
        with self._lock:
            self._parked.check_free(hold.tenant, hold.id, hold.name)
            if self._put(owner, tokens, packed, hold):
                return hold.info
        bound = self._memory.bound
        raise StoreFull(
            f"there is no room for a state of {packed.nbytes + tokens.nbytes:,} bytes in a memory of {bound:,} bytes, where "
            f"those who have less keep theirs, and {trouble}."
        )

    def _check_free(self, hold: Hold) -> None:
        check_name(hold.name)
        for name in filter(None, (hold.id, hold.name)):
            try:
                self._find(hold.tenant, name)
            except UnknownState:
                continue
            raise taken(name)

    def _find(self, tenant: str, id_or_name: str) -> Hold | HoldRow:
        with self._lock:
            self._expire()
            try:
                return self._parked.find(tenant, id_or_name)
            except UnknownState:
                if self._saved is None:
                    raise
        return self._saved.find(tenant, id_or_name)

    def _use(self, tenant: str, id_or_name: str) -> tuple[Packed, Tokens, str]:
        """A held state, its tokens and whose tree it is in."""
        hold = self._find(tenant, id_or_name)
        if isinstance(hold, Hold):
            with self._lock:
                hold.used = time.time()
                self._memory.touch(hold.entry)
                return hold.entry.packed, hold.entry.node.sequence(), hold.entry.owner
        assert self._saved is not None  # there are rows
        packed, tokens, owner, number = self._saved.get(tenant, hold)
        if number:
            self._put(owner, tokens, packed, saved=number)
        return packed, tokens, owner

    def _put(self, owner: str, tokens: Tokens, packed: Packed, hold: Hold | None = None, saved: int = 0) -> bool:
        """Whether there is room for a state in memory; then it is there, and the hold means it. saved: its number on the disk."""
        with self._lock:
            if packed.nbytes + tokens.nbytes > self._memory.bound:
                return False
            entry = self._memory.put(owner, tokens, packed)
            if hold is not None:
                self._parked.add(hold, entry)
            if saved:
                self._memory.save(entry, saved)
            while (surplus := self._memory.surplus(entry)) is not None:
                if self._saved is not None:
                    self._saved.spill(surplus)
                self._evict(surplus)
            if self._memory.nbytes > self._memory.bound:
                self._evict(entry)
                return False
        return True

    def _evict(self, entry: Entry) -> None:
        for tenant, id in list(entry.holds):
            self._parked.remove(self._parked.find(tenant, id), "it had to make room for others")
        self._memory.drop(entry)
        self._memory.evicted += 1

    def _let_go(self, hold: Hold, why: str = "") -> None:
        self._parked.remove(hold, why)
        if not hold.entry.holds:
            self._memory.drop(hold.entry)

    def _expire(self) -> None:
        """Let go what nobody used for long; in memory as well as on the disk once in a second is enough."""
        if self._ttl is not None and time.time() - self._expired >= min(1.0, self._ttl):
            self._expired = time.time()
            for hold in self._parked.all():
                if self._expired - hold.used > self._ttl:
                    self._let_go(hold, unused(self._ttl))


def owner_of(tenant: str, proven: bool) -> str:
    """Whose tree a state is in. What is not proven has a tree of its own, where nobody looks for it by its tokens."""
    return mine(tenant) if proven else secrets.token_hex(8) + mine(tenant)


def mine(tenant: str) -> str:
    """Whose tree the states are in that were made here for this tenant."""
    return f"/{tenant}"


def info_of(hold: Hold | HoldRow) -> StateInfo:
    if isinstance(hold, Hold):
        return hold.info
    return StateInfo(hold.id, hold.name, hold.tokens, hold.bytes, hold.created, hold.parent, "disk", hold.note)
