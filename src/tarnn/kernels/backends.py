"""Which backend computes a call: the only place that chooses.

A backend is a package beside this file, named in `ORDER`, with the functions of `Backend`. The first that does not
refuse the call computes it; eager, the last, takes every call.
"""

import importlib
import warnings
from functools import cache
from typing import Protocol, runtime_checkable

from tarnn.errors import SlowPathWarning
from tarnn.kernels.call import Call, Gradients, Outputs, Returned

ORDER = ("triton", "cpu", "eager")


class Mendable(str):
    """A refusal for a reason that the user can do something about: it is worth a warning."""


@runtime_checkable
class Backend(Protocol):
    """What a package of kernels has. All functions take packed rows too: `Call.cuts`."""

    def refusal(self, call: Call) -> str | None:
        """Why it can't compute this call, in a sentence (`Mendable` if the user can change that), or None."""

    def forward(self, call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
        """The outputs; without denominators where there will be no backward, without a state that nobody wants, if it likes."""

    def backward(self, call: Call, returned: Returned) -> Gradients:
        """The gradients, laid out as `Call.new_gradients` does."""

    def step(self, call: Call, *, inplace: bool = False) -> Outputs:
        """One token per row (t = 1) and the state behind it, written into the one before if asked. S and z are given."""


@cache
def named(name: str) -> Backend:
    return importlib.import_module(f"tarnn.kernels.{name}")


def choose(call: Call) -> Backend:
    """The backend for this call. Warns once where a slower one is taken for a reason that the user can mend."""
    for name in ORDER:
        backend = named(name)
        why = backend.refusal(call)
        if why is None:
            return backend
        if isinstance(why, Mendable):
            _warn_once(why)
    raise AssertionError("eager takes every call")


@cache
def _warn_once(why: str) -> None:
    warnings.warn(why, SlowPathWarning, stacklevel=4)
