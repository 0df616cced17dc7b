"""Checks that a call's arguments have passed once are not repeated: for one token they would take longer than its arithmetic."""

from collections.abc import Callable, Hashable
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.kernels.contract import num_tensors
from tarnn.kernels.tracing import is_untraced
from tarnn.ops.state import State

_MOST = 1000  # kinds of calls that an op remembers
_CONSTANTS = (int, float, str)


def skip_repeated_checks(checked: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function from an op's arguments to its call, or to a record that begins with it, which raises for wrong ones.

    Where the function has cast and computed nothing, its call has the given tensors themselves. Then the next arguments
    with the same shapes, dtypes, devices and constants become a call without it. So the function may look at nothing else,
    and at no numbers of tensors. Tensors of one type stand in the call in the order in which they are given.
    """
    known: dict[Hashable, tuple[Callable[[list], tuple], tuple, Any, Any]] = {}

    @wraps(checked)
    def make_call(*arguments: Any, **options: Any) -> Any:
        if options:
            return checked(*arguments, **options)
        key, tensors = _signature(arguments)
        if key is not None and (found := known.get(key)) is not None:
            pick, constants, Call, Made = found
            call = tuple.__new__(Call, pick(tensors) + constants)
            return call if Made is None else Made(call)
        made = checked(*arguments)
        if key is None:
            return made
        call = getattr(made, "call", made)
        bare = call is made or all(x is None for x in made[1:])
        if bare and (places := _places(call, tensors)) is not None:
            if len(known) >= _MOST:
                known.clear()
            known[key] = itemgetter(*places), call[len(places) :], type(call), None if call is made else type(made)
        return made

    return make_call


def _signature(arguments: tuple) -> tuple[Hashable, list[Tensor | None]]:
    """All that checks look at (None if a call is traced, cast by autocast, or takes anything unknown), and the tensors, None
    after them."""
    key: list[Any] = []
    tensors: list[Tensor | None] = []
    if not is_untraced(arguments[0]) or torch._C._is_any_autocast_enabled():
        return None, tensors
    for x in arguments:
        if x is None or x is True or x is False:
            key.append(x)
            continue
        kind = type(x)
        if kind is Tensor or kind is nn.Parameter:
            key += x.shape, x.dtype, x.is_cpu or x.device
            tensors.append(x)
        elif isinstance(x, FeatureMap):
            if not x.kernel:
                return None, tensors
            key += kind, x.kernel, x.positive
        elif isinstance(x, State):
            key.append(kind)
            for part in vars(x).values():
                if part is None:
                    key.append(None)
                elif type(part) is Tensor:
                    key += part.shape, part.dtype, part.is_cpu or part.device
                    tensors.append(part)
                else:
                    return None, tensors
        elif kind in _CONSTANTS:
            key += kind, x  # 1 is not True
        else:
            return None, tensors
    tensors.append(None)
    return tuple(key), tensors


def _places(call: Any, tensors: list[Tensor | None]) -> list[int] | None:
    """Which of the tensors each tensor of the call is, −1 for None; None if one of them is not among the tensors."""
    record: Any = type(call)
    left, places = list(range(len(tensors) - 1)), []
    for x in call[: num_tensors(record)]:
        place = -1 if x is None else next((i for i in left if tensors[i] is x), None)
        if place is None:
            return None
        places.append(place)
        if place >= 0:
            left.remove(place)
    return places
