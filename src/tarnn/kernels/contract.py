"""The contract between ops and those who compute them: the record of a call, what a backend is, and the one chooser.

A *record* is a named tuple whose tensors stand first, so it *is* its flattened form: an operator of torch takes `*call`,
and `Call(*inputs)` is the call again. `schema` writes the operator's arguments from the fields. The record of an op's call
is in the file of that name beside this one.

A *backend* is a package beside this file, named in `ORDER`. For each op that it computes it has a file of the op's name
with the functions that eager's file has. Its `refusal(call)` says in one sentence why it can't compute a call (`FixableRefusal`
if the user can change that), or None. The first that does not refuse a call computes it; eager, the last, takes all.
"""

import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, get_type_hints

from torch import Tensor

from tarnn.errors import SlowPathWarning

ORDER = ("fla", "cpu", "eager")
_KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    int: "SymInt",
    float: "float",
    float | None: "float?",
}


class FixableRefusal(str):
    """A refusal for a reason that the user can do something about: it is worth a warning."""


@cache
def named(backend: str, op: str) -> Any:
    """The file of this backend that computes this op, or None."""
    name = f"tarnn.kernels.{backend}.{op}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


@cache
def backends(op: str) -> tuple[tuple[str, Any], ...]:
    """The names and files of those that compute this op, in the order in which they are asked."""
    return tuple((name, file) for name in ORDER if (file := named(name, op)) is not None)


def choose(op: str, call: Any) -> Any:
    """The backend for this call. Warns once where a slower one is taken for a reason that the user can mend."""
    for _, backend in backends(op):
        reason = backend.refusal(call)
        if reason is None:
            return backend
        if isinstance(reason, FixableRefusal):
            _warn_once(reason)
    raise AssertionError("eager takes every call")


def reasons(op: str, call: Any) -> dict[str, str | None]:
    """Each backend that is asked for this call, and why it refuses; the last is the one that computes it: None."""
    answers: dict[str, str | None] = {}
    for name, backend in backends(op):
        answers[name] = backend.refusal(call)
        if answers[name] is None:
            break
    return answers


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(reason, SlowPathWarning, stacklevel=4)


# --- records


@cache
def _kinds(record: type) -> tuple[str, ...]:
    """The types of a record's fields as a schema has them."""
    hints = get_type_hints(record)
    return tuple(_KINDS[hints[name]] for name in record._fields)  # type: ignore[attr-defined]


@cache
def num_tensors(record: type) -> int:
    """How many of a record's fields are tensors: the first ones."""
    hints = get_type_hints(record)
    return sum(hints[name] in (Tensor, Tensor | None) for name in record._fields)  # type: ignore[attr-defined]


def present(call: tuple) -> list[Tensor]:
    """The tensors that a call has."""
    return [x for x in call[: num_tensors(type(call))] if x is not None]


def form(call: Any) -> Any:
    """The call without its tensors: for each, whether it is there."""
    kind: Any = type(call)
    n = num_tensors(kind)
    return kind(*[x is not None for x in call[:n]], *call[n:])


def of_form(form: Any, tensors: Sequence) -> tuple[Any, list[Any]]:
    """The call of this form with these in the places of its tensors, and those that are left."""
    kind: Any = type(form)
    n, each = num_tensors(kind), iter(tensors)
    return kind(*[next(each) if there else None for there in form[:n]], *form[n:]), list(each)


def schema(*records: Any, results: Any) -> str:
    """The schema of an operator that takes these records, flattened, and returns the tensors of `results`, but for those
    that have a default."""
    arguments = (f"{kind} {name}" for record in records for name, kind in zip(record._fields, _kinds(record)))
    names = (name for name in results._fields if name not in results._field_defaults)
    return f"({', '.join(arguments)}) -> ({', '.join(f'Tensor {name}' for name in names)})"
