"""Descriptions of stored states, and reasons why the store refuses."""

from typing import NamedTuple

from tarnn.errors import UserError


class StateInfo(NamedTuple):
    """A held state.

    name: another way to call it, of the client's choice. tokens: how many it has seen. bytes: its size. created: in seconds
    since 1970. parent: the id of the state that it goes on from. where: "disk", where it outlives the server, or "memory".
    note: what whoever held it wants to know of it later; a server keeps a response there.
    """

    id: str
    name: str | None
    tokens: int
    bytes: int
    created: float
    parent: str | None
    where: str
    note: str = ""


class StoreStats(NamedTuple):
    """How full the store is, and how often it helped.

    held: ids that clients have. hits, misses: of `longest`; hit_tokens: those that were not read again. evicted: states that
    made room for others. damaged: files that were not what was written. trouble: why states can't be written to the disk, or
    read, a sentence; "" while they can.
    """

    memory_states: int
    memory_bytes: int
    memory_limit: int
    disk_states: int
    disk_bytes: int
    disk_limit: int
    held: int
    hits: int
    misses: int
    hit_tokens: int
    evicted: int
    damaged: int
    trouble: str


class UnknownState(LookupError):
    """No state of this tenant goes by that id or name."""


class StateGone(UnknownState):
    """There was one, and it had to go: by age, for want of room, or because its file was damaged. The sentence says which."""


class UnfitState(UserError):
    """A state that is none of this model's, or that was damaged. The sentence says in which respect."""


class NameTaken(ValueError):
    """Another state of this tenant has that name, or id."""


class StoreTrouble(OSError):
    """The disk can't be read or written now, and the sentence says why. No state is lost by that."""


class StoreFull(ValueError):
    """A state that is larger than all the room there is."""
