"""Where states are kept: found by the tokens that they have seen, or held under an id that a client was given."""

import secrets
import threading
import time
from collections.abc import Hashable
from pathlib import Path

import numpy as np

from tarnn.errors import UserError
from tarnn.serving.model import ServedModel
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.storage.holds import Hold, Holds, check_name, new_id
from tarnn.serving.storage.memory import Entry, Memory
from tarnn.serving.storage.packed import Packed, Packer
from tarnn.serving.storage.tree import Tokens
from tarnn.serving.stored import StateInfo, StoreFull, StoreStats


class StateStore:
    """The states of one model, of any number of tenants, who share nothing.

        store = StateStore(model, memory=2**30)
        store.keep(tenant, snapshot)                  # found by its tokens until something more useful needs the room
        snapshot = store.longest(tenant, tokens)      # after the longest beginning of these tokens; or None
        info = store.hold(tenant, snapshot)           # has an id, and stays
        snapshot = store.get(tenant, info.id)         # to the bit what was put

    memory: bytes at most. ttl: seconds after its last use when a held state goes; None: never. Any number of threads may use
    one store. Methods that take an id or a name raise UnknownState where it means nothing, and StateGone where it did.
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
        if folder is not None:
            raise UserError(f"states are kept in memory only, so far; got the folder {folder}. Leave it out.")
        self._packer = Packer(model)
        self._memory, self._holds, self._ttl = Memory(memory), Holds(), ttl
        self._lock = threading.RLock()
        self._hits = self._misses = self._hit_tokens = 0

    def longest(self, tenant: str, tokens: Tokens) -> Snapshot | None:
        """The state after the longest beginning of these tokens, all of them at most, that is kept for this tenant."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        with self._lock:
            entry = self._memory.longest(tenant, tokens)
            if entry is None:
                self._misses += 1
                return None
            self._memory.touch(entry)
            self._hits += 1
            self._hit_tokens += entry.node.end
            packed, seen = entry.packed, tokens[: entry.node.end].copy()
        return self._packer.unpack(packed, seen)

    def keep(self, tenant: str, snapshot: Snapshot) -> None:
        """Keep a state for whoever reads the same beginning again, until something more useful needs the room.

        Raises UnfitState for a snapshot of another model; one that is larger than the store is not kept.
        """
        packed, tokens = self._packer.pack(snapshot), np.ascontiguousarray(snapshot.tokens, np.int32)
        with self._lock:
            self._put(tenant, tokens, packed)

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

        Raises as `keep` does, NameTaken, ValueError for a name that is none, and StoreFull for a state larger than the store.
        """
        packed, tokens = self._packer.pack(snapshot), np.ascontiguousarray(snapshot.tokens, np.int32)
        return self._hold(tenant, tenant, tokens, packed, id=id, name=name, parent=parent, note=note)

    def get(self, tenant: str, id_or_name: str) -> Snapshot:
        """A held state."""
        packed, tokens = self._use(tenant, id_or_name)
        return self._packer.unpack(packed, tokens)

    def info(self, tenant: str, id_or_name: str) -> StateInfo:
        """What is known of a held state."""
        with self._lock:
            self._expire()
            return self._holds.find(tenant, id_or_name).info

    def list(self, tenant: str) -> list[StateInfo]:
        """All that this tenant holds, oldest first."""
        with self._lock:
            self._expire()
            return [hold.info for hold in self._holds.of(tenant)]

    def fork(self, tenant: str, id_or_name: str, name: str | None = None) -> StateInfo:
        """Another id for the same state, which goes on by itself. Nothing is copied."""
        check_name(name)
        with self._lock:
            self._expire()
            hold = self._holds.find(tenant, id_or_name)
            self._holds.check_free(tenant, name)
            fork = Hold(tenant, new_id(), name, parent=hold.id)
            self._holds.add(fork, hold.entry)
            return fork.info

    def delete(self, tenant: str, id_or_name: str) -> None:
        """The id means nothing any more, and its state goes with it unless another id means it too."""
        with self._lock:
            self._let_go(self._holds.find(tenant, id_or_name))

    def export(self, tenant: str, id_or_name: str) -> bytes:
        """A held state as a file, which `add` takes, here or on another server, and `tarnn generate --state-in` too."""
        packed, tokens = self._use(tenant, id_or_name)
        return self._packer.encode(packed, tokens, with_tokens=True)

    def add(self, tenant: str, data: bytes, name: str | None = None) -> StateInfo:
        """Hold a state that `export` gave. Raises UnfitState for anything else, and as `hold` does.

        It is found by its id alone, not by its tokens: nobody here has seen that it is the state after them.
        """
        check_name(name)
        packed, tokens = self._packer.decode(data, "the uploaded file")
        return self._hold((tenant, secrets.token_hex(8)), tenant, tokens, packed, name=name)

    @property
    def stats(self) -> StoreStats:
        """How full it is, and how often it helped."""
        with self._lock:
            memory = self._memory
            sizes = (len(memory.entries), memory.nbytes, memory.bound, 0, 0, 0, len(self._holds))
            return StoreStats(*sizes, self._hits, self._misses, self._hit_tokens, memory.evicted, "")

    def close(self) -> None:
        """Nothing is asked of it any more."""

    def _hold(
        self,
        root: Hashable,
        tenant: str,
        tokens: Tokens,
        packed: Packed,
        *,
        id: str | None = None,
        name: str | None = None,
        parent: str | None = None,
        note: str = "",
    ) -> StateInfo:
        check_name(name)
        with self._lock:
            self._expire()
            self._holds.check_free(tenant, id, name)
            hold = Hold(tenant, id or new_id(), name, parent, note)
            if not self._put(root, tokens, packed, hold):
                bound = self._memory.bound
                raise StoreFull(f"a state of {packed.nbytes:,} bytes is larger than the store, {bound:,} bytes.")
            return hold.info

    def _use(self, tenant: str, id_or_name: str) -> tuple[Packed, Tokens]:
        with self._lock:
            self._expire()
            hold = self._holds.find(tenant, id_or_name)
            hold.used = time.time()
            self._memory.touch(hold.entry)
            return hold.entry.packed, hold.entry.node.sequence()

    def _put(self, root: Hashable, tokens: Tokens, packed: Packed, hold: Hold | None = None) -> bool:
        """Whether there is room for a state; then it is there, and the hold means it."""
        if packed.nbytes + tokens.nbytes > self._memory.bound:
            return False
        entry = self._memory.put(root, tokens, packed)
        if hold is not None:
            self._holds.add(hold, entry)
        while (surplus := self._memory.surplus(entry)) is not None:
            self._evict(surplus, "it had to make room for others")
        if self._memory.nbytes <= self._memory.bound:
            return True
        self._evict(entry, "")
        return False

    def _evict(self, entry: Entry, why: str) -> None:
        for tenant, id in list(entry.holds):
            self._holds.remove(self._holds.find(tenant, id), why)
        self._memory.drop(entry)
        self._memory.evicted += 1

    def _let_go(self, hold: Hold, why: str = "") -> None:
        self._holds.remove(hold, why)
        if not hold.entry.holds:
            self._memory.drop(hold.entry)

    def _expire(self) -> None:
        if self._ttl is not None:
            for hold in self._holds.older_than(time.time() - self._ttl):
                self._let_go(hold, f"nobody used it for {self._ttl:,.0f} seconds")
