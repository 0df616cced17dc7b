"""Ids that clients were given, in memory: what each means, and why those that are gone are gone."""

import re
import secrets
import time
from dataclasses import dataclass, field

from tarnn.serving.state_info import NameTaken, StateGone, StateInfo, UnknownState
from tarnn.serving.storage.index import NewHold
from tarnn.serving.storage.memory import Entry

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_GONE = 10_000  # ids of which it is known why they are gone


def check_name(name: str | None) -> None:
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(
            f"a state's name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit; "
            f"got {name[:80]!r}."
        )


def new_id(kind: str = "state") -> str:
    """Draw an id that nobody guesses."""
    return f"{kind}_{secrets.token_hex(16)}"


def taken(name: str) -> NameTaken:
    return NameTaken(f"there is a state {name!r} already. Delete it first, or take another name.")


def unknown(name: str) -> UnknownState:
    return UnknownState(f"there is no state {name[:80]!r}.")


def gone(name: str, why: str) -> StateGone:
    return StateGone(f"state {name!r} is gone: {why}.")


def unused(ttl: float) -> str:
    return f"nobody used it for {ttl:,.0f} seconds"


@dataclass(eq=False)
class Hold:
    """An id of a tenant's, and the state that it means. used: in seconds since 1970."""

    tenant: str
    id: str
    name: str | None = None
    parent: str | None = None
    note: str = ""
    entry: Entry = field(init=False)

    def __post_init__(self) -> None:
        self.created = self.used = time.time()

    @property
    def new(self) -> NewHold:
        """What the disk is to know of it."""
        return NewHold(self.tenant, self.id, self.name, self.parent, self.note, self.created)

    @property
    def info(self) -> StateInfo:
        """Of a state in memory."""
        return self.info_of(self.entry.node.end, self.entry.packed.nbytes, "memory")

    def info_of(self, tokens: int, size: int, where: str) -> StateInfo:
        return StateInfo(self.id, self.name, tokens, size, self.created, self.parent, where, self.note)


class Holds:
    """Every tenant's holds. Each keeps its state's entry from being let go before those that nobody has an id for."""

    def __init__(self) -> None:
        self._holds: dict[str, dict[str, Hold]] = {}
        self._names: dict[tuple[str, str], Hold] = {}
        self._gone: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._holds.values()))

    def find(self, tenant: str, id_or_name: str) -> Hold:
        """Raises UnknownState; StateGone where it is known what became of it."""
        hold = self._holds.get(tenant, {}).get(id_or_name) or self._names.get((tenant, id_or_name))
        if hold is not None:
            return hold
        if (why := self._gone.get((tenant, id_or_name))) is not None:
            raise gone(id_or_name, why)
        raise unknown(id_or_name)

    def check_free(self, tenant: str, *names: str | None) -> None:
        """Raise NameTaken for an id or a name that means a state already."""
        for name in filter(None, names):
            try:
                self.find(tenant, name)
            except UnknownState:
                continue
            raise taken(name)

    def add(self, hold: Hold, entry: Entry) -> None:
        hold.entry = entry
        self._holds.setdefault(hold.tenant, {})[hold.id] = hold
        if hold.name is not None:
            self._names[hold.tenant, hold.name] = hold
        self._gone.pop((hold.tenant, hold.id), None)
        entry.holds.add((hold.tenant, hold.id))

    def remove(self, hold: Hold, why: str = "") -> None:
        """why: what who asks for it later is told; "" for nothing."""
        holds = self._holds[hold.tenant]
        del holds[hold.id]
        if not holds:
            del self._holds[hold.tenant]
        if hold.name is not None:
            del self._names[hold.tenant, hold.name]
        hold.entry.holds.discard((hold.tenant, hold.id))
        for name in (hold.id, hold.name) if why else ():
            if name is not None:
                self._gone[hold.tenant, name] = why
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def of(self, tenant: str) -> list[Hold]:
        return sorted(self._holds.get(tenant, {}).values(), key=lambda hold: hold.created)

    def all(self) -> list[Hold]:
        return [hold for holds in self._holds.values() for hold in holds.values()]
