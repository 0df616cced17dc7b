"""Whether a state is one that the fused step can write: of the model's kind, contiguous, on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.ops.softmax.cache import RowCaches
from tarnn.ops.states import HybridState


class UnfitState(ValueError):
    """A state that the fused step can't write: `model.step` says what is wrong with it, or takes it."""


def check_state(state: ModelState, expected: Sequence[State], batch_size: int) -> None:
    """Raise UnfitState for a state of another kind or number of rows. expected: each layer's state, with one row."""
    position = state.position
    fits = position.shape == (batch_size,) and position.dtype == torch.int64 and position.is_contiguous()
    if len(expected) != len(state.layers) or not fits:
        raise UnfitState(
            f"the state is of {len(state.layers)} layers and {len(state.position)} rows; the model has {len(expected)} "
            f"layers, and {batch_size} tokens came. Make it with model.new_state({batch_size})."
        )
    for layer, row in zip(state.layers, expected, strict=True):
        if isinstance(layer, RowCaches) and isinstance(row, KVCache):
            fits = len(layer.rows) == batch_size and _fit(layer.rows, row)
        else:
            fits = type(layer) is type(row) and _fits(layer, row, batch_size)
        if not fits:
            wanted = row.map(lambda x: x.expand(batch_size, *x.shape[1:]))
            raise UnfitState(
                f"the fused step takes states as model.new_state({batch_size}) makes them, contiguous and float32: "
                f"{wanted!r}; got {layer!r}."
            )


def _fits(layer: State, row: State, batch_size: int) -> bool:
    """As wide, and as the kernel reads it; how long a cache is does not matter, and it may have a mask."""
    if isinstance(layer, HybridState):
        return all(
            x.shape == (batch_size, *wanted.shape[1:])
            and x.dtype == wanted.dtype
            and x.device.type == "cpu"
            and x.is_contiguous()
            for x, wanted in zip(vars(layer).values(), vars(row).values(), strict=True)
        )
    tensors, dtypes = tensors_of(layer), [torch.float32]
    expected = [(batch_size, *x.shape[1:]) for x in tensors_of(row)]
    if isinstance(layer, KVCache):
        expected = [(*x[:2], layer.capacity, x[3]) for x in expected]
        dtypes.append(torch.bfloat16)
    numbers = [x for x in tensors if x.dtype != torch.bool]  # all but a cache's mask
    types = {x.dtype for x in numbers}
    return (
        [tuple(x.shape) for x in numbers] == expected
        and len(types) < 2
        and types.issubset(dtypes)
        and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)
    )


def _fit(rows: Sequence[KVCache], wanted: KVCache) -> bool:
    """Compare caches of single rows with the wanted one; a server does so whenever its rows change."""
    _, g, _, d = wanted.k.shape
    e = wanted.v.shape[-1]
    return all(
        x.shape == (1, g, cache.capacity, width)
        and x.dtype == rows[0].k.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and x.is_contiguous()
        for cache in rows
        for x, width in ((cache.k, d), (cache.v, e))
    ) and all(cache.mask is None for cache in rows)


def tensors_of(layer: State) -> list[Tensor]:
    """The tensors of a layer's state that the kernel reads, whole."""
    if isinstance(layer, RowCaches):
        return [x for row in layer.rows for x in (row.k, row.v)]
    if isinstance(layer, HybridState):  # nothing fades there, and nothing is in slots
        return [layer.k, layer.v, layer.S, layer.z, layer.M, layer.count]
    return [x for x in vars(layer).values() if isinstance(x, Tensor)]
