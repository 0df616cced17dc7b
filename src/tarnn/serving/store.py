"""Where states are kept: found by the tokens that they have seen, or held under an id that a client was given."""

import builtins
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np

from tarnn.serving.model import ServedModel
from tarnn.serving.snapshot import Snapshot, Tokens
from tarnn.serving.state_info import StateGone, StateInfo, StoreFull, StoreStats
from tarnn.serving.storage.disk import ROOM, Disk
from tarnn.serving.storage.disk_cache import DAMAGED, DiskCache
from tarnn.serving.storage.ids import Hold, Holds, check_name, gone, mine, new_id, owner_of
from tarnn.serving.storage.packed import Packed, Packer, seal
from tarnn.serving.storage.states import Entry, States

# tokens of states on disk take one part in 16 of its bound in memory; at least 16 MiB may be
TREES, LEAST_TREES = 16, 2**24


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
        self._packer, self._ttl, self._lock = Packer(model), ttl, threading.RLock()
        self._states = States(memory, None if folder is None else max(disk // TREES, LEAST_TREES))
        self._holds = Holds()
        self._hits = self._misses = self._hit_tokens = 0
        self._closed, self._expired = False, 0.0
        self.cache: DiskCache | None = None
        if folder is not None:
            opened = Disk(folder, self._packer, disk, self._states, self._holds, self._lock)
            self.cache = DiskCache(opened, self._lock, self._expire)

    def longest(self, tenant: str, tokens: Tokens, room: int = 0) -> Snapshot | None:
        """Return the state after the longest beginning of these tokens, all of them at most, that is kept for this tenant.

        room: tokens that its caches have room for, at least.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        with self._lock:
            found = [(x, x.node.end, x.packed) for x in self._states.path(mine(tenant), tokens)]
        for entry, length, packed in found:
            try:
                packed = self._packed(entry, tokens[:length], packed)
            except (StateGone, OSError) as error:
                if self.cache is not None and not isinstance(error, StateGone):
                    self.cache.trouble = f"states on disk can't be read: {error}"
                continue
            with self._lock:
                self._hits += 1
                self._hit_tokens += length
            return self._packer.unpack(packed, tokens[:length].copy(), room=room)
        with self._lock:
            self._misses += 1
        return None

    def keep(self, tenant: str, snapshot: Snapshot) -> None:
        """Keep a state for whoever reads the same beginning again, until something more useful needs the room.

        Raises UnfitState for a snapshot of another model. One that is larger than the store is not kept, nor one that is not
        proven to be the state after its tokens.
        """
        if snapshot.proven:
            packed, tokens = self._pack(tenant, snapshot)
            with self._lock:
                self._load(self._states.place(mine(tenant), tokens), packed)

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
        """Keep a state under an id, this one or a new one, and a name, if it shall have one. note: a text for `info`.

        If the disk can't be written, it is held in memory: so says `where` of what is returned, and `stats.trouble` why.
        Raises as `keep` does, NameTaken, ValueError for a name that is none, and StoreFull if there is no room at all.
        """
        packed, tokens = self._pack(tenant, snapshot)
        return self._hold(
            owner_of(tenant, snapshot.proven), tokens, packed, Hold(tenant, id or new_id(), name, parent, note)
        )

    def get(self, tenant: str, id_or_name: str) -> Snapshot:
        """Return a held state."""
        packed, tokens, owner = self._use(self._find(tenant, id_or_name))
        return self._packer.unpack(packed, tokens, proven=owner == mine(tenant))

    def info(self, tenant: str, id_or_name: str) -> StateInfo:
        """Return what is known of a held state."""
        hold = self._find(tenant, id_or_name)
        return hold.info(self.cache.note(hold) if self.cache is not None else hold.note)

    def list(self, tenant: str) -> builtins.list[StateInfo]:
        """Return all that this tenant holds, oldest first, without their notes."""
        with self._lock:
            return [x.info() for x in self._holds.of(tenant) if not (x.entry.damaged or self._is_expired(x))]

    def fork(self, tenant: str, id_or_name: str, name: str | None = None) -> StateInfo:
        """Give another id to the same state, which goes on by itself. Nothing is copied."""
        hold = self._find(tenant, id_or_name)
        fork = Hold(tenant, new_id(), name, hold.id, tokens=hold.tokens, bytes=hold.bytes, model=hold.model)
        self._check_free(fork)
        if self.cache is not None and hold.saved:
            _, tokens, _ = self._use(hold)
            self.cache.fork(hold, fork, tokens)
        else:
            with self._lock:
                self._holds.add(fork, hold.entry)
        return fork.info()

    def delete(self, tenant: str, id_or_name: str) -> None:
        """Remove an id, and its state unless another id means it too."""
        hold = self._find(tenant, id_or_name)
        if self.cache is not None and hold.saved:
            self.cache.remove_hold(hold)
        else:
            self._let_go(hold)

    def export(self, tenant: str, id_or_name: str) -> bytes:
        """Return a held state as a file, which `add` takes, here or on another server, and `tarnn generate --state-in` too."""
        packed, tokens, _ = self._use(self._find(tenant, id_or_name))
        return self._packer.encode(packed, tokens)

    def add(self, tenant: str, data: bytes, name: str | None = None) -> StateInfo:
        """Hold a state that `export` gave. Raises UnfitState for anything else, and as `hold` does.

        It is found by its id alone, not by its tokens, and neither is what goes on from it: whether it is the state after them
        is not proven.
        """
        check_name(name)
        packed, tokens = self._packer.decode(data, "the uploaded file")
        return self._hold(owner_of(tenant, False), tokens, packed, Hold(tenant, new_id(), name))

    @property
    def stats(self) -> StoreStats:
        """How full it is, and how often it helped."""
        disk, bound, evicted, damaged, trouble = 0, 0, 0, 0, ""
        if self.cache is not None:
            disk, trouble = self.cache.size
            bound, evicted, damaged = self.cache.disk.bound, self.cache.disk.evicted, self.cache.damaged
        with self._lock:
            states = self._states
            sizes = (len(states.loaded), states.nbytes, states.bound, len(states.saved), disk, bound, len(self._holds))
            counts = (self._hits, self._misses, self._hit_tokens, states.evicted + evicted, damaged)
        return StoreStats(*sizes, *counts, trouble)

    def close(self) -> None:
        """Write to the disk what only memory has, for some seconds at most, and let others have the folder."""
        if self.cache is not None and not self._closed:
            self._closed = True
            self.cache.close()

    def _pack(self, tenant: str, snapshot: Snapshot) -> tuple[Packed, Tokens]:
        """Copy a snapshot, but for keys and values that a kept state of a beginning of its tokens has already."""
        above, tokens = None, np.ascontiguousarray(snapshot.tokens, np.int32)
        if self._packer.grows and snapshot.proven:
            with self._lock:
                path = self._states.path(mine(tenant), tokens)
                above = next((x.packed for x in path if x.packed is not None), None)
        return self._packer.pack(snapshot, above), tokens

    def _hold(self, owner: str, tokens: Tokens, packed: Packed, hold: Hold) -> StateInfo:
        hold.tokens, hold.bytes, hold.model, note = len(tokens), packed.nbytes, self._states.model, hold.note
        self._check_free(hold)
        trouble = "there is no folder for states"
        with self._lock:
            entry = self._states.place(owner, tokens)
            entry.writes += 1
        try:
            if self.cache is not None:
                try:
                    self.cache.hold(entry, tokens, packed, hold)
                except (OSError, sqlite3.Error) as error:
                    trouble = str(error)
            with self._lock:
                if not hold.saved:
                    self._holds.check_free(hold.tenant, hold.id, hold.name)
                    self._holds.add(hold, entry)
                if self._load(entry, packed) or hold.saved:
                    return hold.info(note)
                self._holds.remove(hold)
        finally:
            with self._lock:
                entry.writes -= 1
                self._states.release(entry)
        raise StoreFull(
            f"there is no room for a state of {packed.nbytes + tokens.nbytes:,} bytes in a memory of {self._states.bound:,} "
            f"bytes, where those who have less keep theirs, and {trouble}."
        )

    def _check_free(self, hold: Hold) -> None:
        check_name(hold.name)
        with self._lock:
            self._expire_in_memory()
            self._holds.check_free(hold.tenant, hold.id, hold.name)

    def _find(self, tenant: str, id_or_name: str) -> Hold:
        with self._lock:
            self._expire_in_memory()
            hold = self._holds.find(tenant, id_or_name)
            if self._is_expired(hold):
                raise gone(id_or_name, self._why_expired)
        if self.cache is not None:
            self.cache.check(hold, id_or_name)
        return hold

    def _use(self, hold: Hold) -> tuple[Packed, Tokens, str]:
        """Return a held state, its tokens and the owner of its tree."""
        with self._lock:
            entry, hold.used = hold.entry, time.time()
            tokens, owner, packed = entry.tokens, entry.owner, entry.packed
        packed = self._packed(entry, tokens, packed, hold)
        if hold.saved and (entry.tenant != hold.tenant or hold.seal != seal(hold.tenant, hold.id, tokens)):
            raise gone(hold.id, DAMAGED)
        return packed, tokens, owner

    def _packed(self, entry: Entry, tokens: Tokens, packed: Packed | None, hold: Hold | None = None) -> Packed:
        """Return a state, from the disk if it is not in memory; then it is there, too. Raises OSError, StateGone."""
        if self.cache is not None:
            self.cache.used(entry, hold)
        if packed is None:
            assert self.cache is not None  # it is on its disk
            packed = self.cache.load(entry, tokens, hold.id if hold else "")
            with self._lock:
                if entry.node.kept is entry:
                    self._load(entry, packed)
        else:
            with self._lock:
                self._states.touch(entry)
        return packed

    def _load(self, entry: Entry, packed: Packed) -> bool:
        """Put a state into memory, if there is room; return whether it is there."""
        states = self._states
        if packed.nbytes + entry.node.tokens.nbytes > states.bound:
            states.release(entry)
            return False
        states.load(entry, packed)
        while (surplus := states.surplus(entry)) is not None:
            self._unload(surplus)
        if states.nbytes > states.bound:
            self._unload(entry)
            return False
        return True

    def _unload(self, entry: Entry) -> None:
        if self.cache is not None:
            self.cache.spill(entry)
        if not entry.id:
            for hold in list(entry.holds):
                self._holds.remove(hold, ROOM)
        self._states.evicted += 1
        self._states.unload(entry)

    def _let_go(self, hold: Hold, why: str = "") -> None:
        """Remove an id that is in memory alone, and its state if that has no other."""
        with self._lock:
            self._holds.remove(hold, why)
            if not hold.entry.holds and hold.entry.packed is not None:
                self._states.unload(hold.entry)

    @property
    def _why_expired(self) -> str:
        return f"nobody used it for {self._ttl:,.0f} seconds"

    def _is_expired(self, hold: Hold) -> bool:
        return self._ttl is not None and time.time() - hold.used > self._ttl

    def _expire(self) -> None:
        """Remove ids that were not used for long; the disk's thread calls it."""
        with self._lock:
            expired = [x for x in self._holds.all() if self._is_expired(x)]
        for hold in expired:
            if hold.saved and self.cache is not None:
                self.cache.disk.remove_hold(hold, self._why_expired)
            else:
                self._let_go(hold, self._why_expired)

    def _expire_in_memory(self) -> None:
        """Do the same without a disk, once in a second at most."""
        if self.cache is None and self._ttl is not None and time.time() - self._expired >= min(1.0, self._ttl):
            self._expired = time.time()
            self._expire()
