"""Ids that clients have: the state that each one means, and why those that are gone are gone."""

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from tarnn.serving.state_info import NameTaken, StateGone, StateInfo, UnknownState

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_GONE = 10_000  # ids of which it is known why they are gone


def check_name(name: str | None) -> None:
    """Raise ValueError for a name that no state can have."""
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(
            f"a state's name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit; "
            f"got {name[:80]!r}."
        )


def new_id(kind: str = "state") -> str:
    """Draw an id that nobody guesses."""
    return f"{kind}_{secrets.token_hex(16)}"


def owner_of(tenant: str, proven: bool) -> str:
    """Return the owner of a state's tree. What is not proven has a tree of its own, where it is not found by its tokens."""
    return mine(tenant) if proven else secrets.token_hex(8) + mine(tenant)


def mine(tenant: str) -> str:
    """Return the owner of states that were made here for this tenant."""
    return f"/{tenant}"


def taken(name: str) -> NameTaken:
    return NameTaken(f"there is a state {name!r} already. Delete it first, or take another name.")


def gone(name: str, why: str) -> StateGone:
    return StateGone(f"state {name!r} is gone: {why}.")


@dataclass(eq=False)
class Hold:
    """An id of a tenant, and the state that it means.

    bytes: of the state in memory. created, used: in seconds since 1970. model: of the state, as the index numbers it. seal: over
    tenant, id and tokens. saved: whether it is in the index; then its note is there alone, and is None here.
    """

    tenant: str
    id: str
    name: str | None = None
    parent: str | None = None
    note: str | None = ""
    tokens: int = 0
    bytes: int = 0
    created: float = field(default_factory=lambda: time.time())
    used: float = field(default_factory=lambda: time.time())
    model: int = 0
    seal: str = ""
    note_bytes: int = 0
    entry: Any = None  # of storage.states

    @property
    def saved(self) -> bool:
        return self.note is None

    def info(self, note: str | None = None) -> StateInfo:
        where = "disk" if self.saved else "memory"
        return StateInfo(self.id, self.name, self.tokens, self.bytes, self.created, self.parent, where, note or "")


class Holds:
    """All tenants' holds, of all models of a folder; model: the one that is served. Used under the store's lock."""

    def __init__(self) -> None:
        self.model = 0
        self.clear()

    def clear(self) -> None:
        self._holds: dict[str, dict[str, Hold]] = {}
        self._names: dict[tuple[str, int, str], Hold] = {}
        self._gone: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._holds.values()))

    def find(self, tenant: str, id_or_name: str) -> Hold:
        """Return the hold of an id, or else of a name of the served model.

        Raises UnknownState; StateGone if it is known why it is gone.
        """
        by_name = self._names.get((tenant, self.model, id_or_name))
        hold = self._holds.get(tenant, {}).get(id_or_name) or by_name
        if hold is not None:
            return hold
        if (why := self._gone.get((tenant, id_or_name))) is not None:
            raise gone(id_or_name, why)
        raise UnknownState(f"there is no state {id_or_name[:80]!r}.")

    def check_free(self, tenant: str, *names: str | None) -> None:
        """Raise NameTaken for an id or a name that means a state already."""
        for name in filter(None, names):
            try:
                self.find(tenant, name)
            except UnknownState:
                continue
            raise taken(name)

    def add(self, hold: Hold, entry: Any) -> None:
        """Bind an id to a state."""
        hold.entry = entry
        entry.holds.add(hold)
        self._holds.setdefault(hold.tenant, {})[hold.id] = hold
        if hold.name is not None:
            self._names[hold.tenant, hold.model, hold.name] = hold
        self._gone.pop((hold.tenant, hold.id), None)

    def remove(self, hold: Hold, why: str = "") -> None:
        """Unbind an id. why: the reason for `find` to give later; "" for none."""
        holds = self._holds.get(hold.tenant, {})
        if holds.get(hold.id) is not hold:
            return  # by another thread
        del holds[hold.id]
        if not holds:
            del self._holds[hold.tenant]
        if hold.name is not None:
            self._names.pop((hold.tenant, hold.model, hold.name), None)
        hold.entry.holds.discard(hold)
        if why:
            self.bury(hold.tenant, why, hold.id, hold.name)

    def bury(self, tenant: str, why: str, *names: str | None) -> None:
        """Remember why ids or names mean nothing any more."""
        for name in filter(None, names):
            self._gone[tenant, name] = why
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def of(self, tenant: str) -> list[Hold]:
        """Return this tenant's holds of the served model, oldest first."""
        holds = (x for x in self._holds.get(tenant, {}).values() if x.model == self.model)
        return sorted(holds, key=lambda hold: hold.created)

    def all(self) -> list[Hold]:
        return [hold for holds in self._holds.values() for hold in holds.values()]
