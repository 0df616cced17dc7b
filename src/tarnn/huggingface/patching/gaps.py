"""Padding among the new tokens of rows that go on with a cache: a layer reads each row's own tokens, and nothing else.

transformers sets padding to zero there, and a linear layer's state decays over it. The model, which is told, tells its layers;
a layer takes the rows with equally many tokens together, with their part of its cache.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

_REAL: ContextVar[Tensor | None] = ContextVar("real", default=None)  # (b, t): which of the new tokens are no padding


def find_gaps(mask: Any, cache: Any, shape: tuple[int, int]) -> Tensor | None:
    """Which new tokens (b, t) are real, where rows go on with a cache and some are not; else None."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or cache is None:
        return None
    rows, new = shape
    if rows == 1 and any(getattr(x, "record_past", False) for x in getattr(cache, "layers", ())):
        return None  # an assistant, for which transformers takes the text's own pad tokens as padding: they are read as text
    if new == 1 or mask.shape[1] <= new or not bool((mask[:, :-new].any(1) & ~mask[:, -new:].all(1)).any()):
        return None
    if any(getattr(x, "record_past", False) for x in getattr(cache, "layers", ())):
        raise ValueError(
            "rows that continue a cache have padding among their new tokens while it records how to go back. Continue with new "
            "tokens of equal number in all rows, or each row alone."
        )
    return mask[:, -new:].bool()


@contextmanager
def telling(real: Tensor | None) -> Iterator[None]:
    """Let layers called within know which tokens are real."""
    token = _REAL.set(real)
    try:
        yield
    finally:
        _REAL.reset(token)


def gaps_here(t: int) -> Tensor | None:
    """Which of the t tokens of this call are real, where the model was told of gaps."""
    real = None if torch.compiler.is_compiling() else _REAL.get()
    return real if real is not None and real.shape[1] == t else None


def by_rows(forward: Callable, layer: Any, args: tuple, kwargs: Mapping[str, Any], real: Tensor, mask: str) -> Any:
    """forward(layer, …) of the real tokens alone: rows with equally many together. Outputs at padding are zeros."""
    counts, whole, rest = real.sum(1), None, ()
    for n in counts[counts > 0].unique().tolist():
        rows = (counts == n).nonzero()[:, 0]
        place = (rows[:, None], real[rows].nonzero()[:, 1].view(len(rows), n))
        caches: list[tuple[Any, Any]] = []

        def part(x: Any, rows: Tensor = rows, place: tuple = place, caches: list = caches) -> Any:
            if isinstance(x, Cache):
                caches.append((x, _part_of(x, layer.layer_idx, rows)))
                return caches[-1][1]
            return x[place] if isinstance(x, Tensor) and x.shape[:2] == real.shape else x

        given = {name: part(x) for name, x in kwargs.items()}
        found = forward(layer, *(part(x) for x in args), **given | {mask: None} if mask in given else given)
        out, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        whole = out.new_zeros(*real.shape, *out.shape[2:]) if whole is None else whole
        whole[place] = out
        for x, y in caches:
            _put_back(x, y, layer.layer_idx, rows)
    assert whole is not None  # a call with padding alone goes by another way
    return (whole, *rest) if rest else whole


_DICTS = ("conv_states", "recurrent_states")  # of a layer: a tensor (b, …) or None for each state


def _part_of(cache: Any, i: int, rows: Tensor) -> Any:
    """A cache with these rows of layer i alone, which may be written."""
    part = copy.copy(cache)
    part.layers = list(cache.layers)
    part.layers[i] = layer = copy.copy(cache.layers[i])
    vars(layer).pop("tarnn_undo", None)
    for name in _DICTS:
        if hasattr(layer, name):
            setattr(layer, name, {j: None if x is None else x[rows] for j, x in getattr(layer, name).items()})
    if hasattr(cache, "linear_cache"):  # MiniMax's
        part.linear_cache = list(cache.linear_cache)
        part.linear_cache[i] = cache.linear_cache[i][rows]
    return part


def _put_back(cache: Any, part: Any, i: int, rows: Tensor) -> None:
    """Write the rows of layer i into the cache they came from."""
    if hasattr(cache.layers[i], "tarnn_undo"):
        cache.layers[i].tarnn_undo.num_tokens = None  # rows have read different numbers
    for name in _DICTS:
        for j, x in getattr(part.layers[i], name, {}).items():
            if x is not None:
                getattr(cache.layers[i], name)[j][rows] = x
    if hasattr(cache, "linear_cache"):
        cache.linear_cache[i][rows] = part.linear_cache[i]
