"""Reference-counted replacement of attributes of modules, classes and layers."""

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

_ABSENT = object()
LOCK = threading.RLock()


class _Replacement:
    """An attribute that is replaced for as long as somebody holds it."""

    def __init__(self, before: Any, now: Any):
        self.before, self.now, self.holders = before, _function(now), set[int]()


def _function(value: Any) -> Any:
    """Return the function of a method, without its owner, which would otherwise never be freed."""
    return getattr(value, "__func__", value)


_REPLACED: WeakKeyDictionary[Any, dict[str, _Replacement]] = WeakKeyDictionary()  # owner → name → its replacement


def original(owner: Any, name: str) -> Any:
    """Return the original of `owner.name`: its value before it was replaced."""
    replacement = _REPLACED.get(owner, {}).get(name)
    if replacement is None:
        return getattr(owner, name)
    # a class inherits it
    return getattr(super(owner, owner), name) if replacement.before is _ABSENT else replacement.before


def acquire(owner: Any, name: str, value: Any, holder: int) -> None:
    """Set `owner.name` to `value`, unless it is replaced already, and count one more holder."""
    replaced = _REPLACED.setdefault(owner, {})
    if name not in replaced:
        replaced[name] = _Replacement(vars(owner).get(name, _ABSENT), value)
        setattr(owner, name, value)
    replaced[name].holders.add(holder)


def release(owners: Iterable[Any], holder: int | None = None) -> int:
    """Release all replacements of `owners`; restore those without other holders, and return their number.

    holder None: for all holders. An attribute that somebody else has replaced meanwhile stays as it is.
    """
    restored = 0
    for owner in owners:
        replaced = _REPLACED.get(owner, {})
        for name, replacement in list(replaced.items()):
            replacement.holders -= replacement.holders if holder is None else {holder}
            if replacement.holders:
                continue
            del replaced[name]
            restored += 1
            if _function(vars(owner).get(name)) is not replacement.now:
                continue
            if replacement.before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, replacement.before)
    return restored


def owners() -> list[Any]:
    """Return all objects with a replaced attribute."""
    return [owner for owner, replaced in _REPLACED.items() if replaced]
