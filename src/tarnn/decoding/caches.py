"""Key/value caches of a state as the fused step counts them: how long they are, and what becomes of them."""

from dataclasses import replace

import torch

from tarnn.decoding.state_check import tensors_of
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.ops.softmax.cache import RowCaches, full


def longer(layers: tuple[State, ...], count: int) -> tuple[State, ...]:
    """Return the layers' states once so many keys were written after those of each cache."""
    return tuple(
        replace(x, length=x.length + count)
        if isinstance(x, KVCache)
        else RowCaches(tuple(replace(row, length=row.length + count) for row in x.rows))
        if isinstance(x, RowCaches)
        else x
        for x in layers
    )


def check_room(state: ModelState, count: int) -> None:
    """Raise ValueError where a cache has no room for so many keys more, or is not as long as its row's position says."""
    for layer in state.layers:
        for cache in caches_of(layer):
            if cache.length + count > cache.capacity:
                raise full(cache.capacity, cache.length, count)
        if isinstance(layer, RowCaches) and [x.length for x in layer.rows] != state.position.tolist():
            raise ValueError(
                f"rows with caches of their own have as many keys as they have seen tokens; got "
                f"{[x.length for x in layer.rows]} at positions {state.position.tolist()}."
            )


def caches_of(layer: State) -> tuple[KVCache, ...]:
    return layer.rows if isinstance(layer, RowCaches) else (layer,) if isinstance(layer, KVCache) else ()


def widened(layer: State) -> State:
    """Return a state as the step keeps it: the last inputs in float32, keys and values not in float16."""
    narrow = {torch.float16} if isinstance(layer, KVCache | RowCaches) else {torch.float16, torch.bfloat16}
    if all(x.dtype not in narrow for x in tensors_of(layer)):
        return layer
    return layer.map(lambda x: x.float() if x.dtype in narrow else x)


def copy_of(state: ModelState, capacity: int = 0) -> ModelState:
    """Copy a state; its caches hold what is there, or `capacity` tokens if those are more."""
    if not any(x.grows for x in getattr(state, "layers", ())):  # a cache of transformers has its own room
        return state.clone()
    return replace(state, layers=tuple(_copy(x, capacity) for x in state.layers), position=state.position.clone())


def _copy(layer: State, capacity: int) -> State:
    if isinstance(layer, RowCaches):
        return layer.resized(capacity)
    return layer.resized(max(layer.length, capacity)) if isinstance(layer, KVCache) else layer.clone()
