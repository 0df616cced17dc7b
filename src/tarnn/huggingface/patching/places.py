"""Where something stands in the place of something else, for how long, and what stood there before."""

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

_ABSENT = object()
LOCK = threading.RLock()


class _Place:
    """An attribute that is replaced for as long as somebody holds it."""

    def __init__(self, before: Any, now: Any):
        self.before, self.now, self.holders = before, _function(now), set[int]()


def _function(value: Any) -> Any:
    """Return the function of a method, without its owner, which would otherwise never be freed."""
    return getattr(value, "__func__", value)


_PLACES: WeakKeyDictionary[Any, dict[str, _Place]] = (
    WeakKeyDictionary()
)  # modules, classes, and layers of single models


def before(owner: Any, name: str) -> Any:
    """Return the original of `owner.name`: its value before it was replaced."""
    place = _PLACES.get(owner, {}).get(name)
    if place is None:
        return getattr(owner, name)
    return getattr(super(owner, owner), name) if place.before is _ABSENT else place.before  # a class inherits it


def hold(owner: Any, name: str, value: Any, holder: int) -> None:
    """Put `value` there, unless something was put there already, and count one more holder."""
    places = _PLACES.setdefault(owner, {})
    if name not in places:
        places[name] = _Place(vars(owner).get(name, _ABSENT), value)
        setattr(owner, name, value)
    places[name].holders.add(holder)


def release(owners: Iterable[Any], holder: int | None = None) -> int:
    """Let go of all places of `owners`; those that nobody else holds get back what stood there. How many did.

    holder None: for all holders. A place where somebody else has put something meanwhile stays as it is.
    """
    restored = 0
    for owner in owners:
        places = _PLACES.get(owner, {})
        for name, place in list(places.items()):
            place.holders -= place.holders if holder is None else {holder}
            if place.holders:
                continue
            del places[name]
            restored += 1
            if _function(vars(owner).get(name)) is not place.now:
                continue
            if place.before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, place.before)
    return restored


def owners() -> list[Any]:
    """Everything of which a place is held."""
    return [owner for owner, places in _PLACES.items() if places]
