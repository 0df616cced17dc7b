"""Checks of a config's values. Each raises ValueError, in one sentence, for a value that the key can't have."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from tarnn.registry import Registry


def check_positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}.")
    if value >= 2**40:
        raise ValueError(f"{name} must be below 2⁴⁰; got {value}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}.")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """From `low` to below `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
        raise ValueError(f"{name} must be a number from {low} to below {high:g}; got {value!r}.")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        close = get_close_matches(str(value), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.{hint}")


def check_pattern(name: str, value: Any, known: Registry, num_layers: int) -> None:
    """A name, or a list of names that is repeated over the layers."""
    for choice in value if isinstance(value, list | tuple) else [value]:
        known.find(choice)
    if not isinstance(value, str) and (not value or num_layers % len(value)):
        raise ValueError(
            f"a list of {name}s is repeated over the layers, so their number must be a multiple of its "
            f"length; got {len(value)} {name}s for {num_layers} layers."
        )


def check_options(key: str, options: Any, registry: Registry, example: str) -> None:
    """Options by the name of their class, each a value that a file can hold."""
    if not isinstance(options, dict) or not all(isinstance(x, dict) for x in options.values()):
        raise ValueError(f"{key} holds options under the name that they belong to, as in {example}; got {options!r}.")
    if unknown := sorted(set(options) - {*registry.names(), *registry}):
        raise ValueError(
            f"{key}: no {registry.what} is called {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(registry.names())}."
        )
    for name, own_options in options.items():
        for option, value in own_options.items():
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(x, str | int | float | None) for x in values):
                raise ValueError(
                    f"in a config the {option} of {name!r} is a name, a number, true, false, null or a list of these; got "
                    f"{value!r}."
                )
