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
        if not _fits(layer, row, batch_size):
            wanted = row.map(lambda x: x.expand(batch_size, *x.shape[1:]))
            raise UnfitState(
                f"the fused step takes states as model.new_state({batch_size}) makes them, contiguous and float32: "
                f"{wanted!r}; got {layer!r}."
            )


def _fits(layer: State, row: State, rows: int) -> bool:
    """As wide, and as the kernel reads it; how long a cache is does not matter, and one that all rows share may have a mask."""
    if isinstance(layer, RowCaches) and isinstance(row, KVCache):
        alike = len(layer.rows) == rows and len({x.k.dtype for x in layer.rows}) < 2
        return alike and all(x.mask is None and _fits(x, row, 1) for x in layer.rows)
    if type(layer) is not type(row):
        return False
    wanted = {name: (x.dtype, (rows, *x.shape[1:])) for name, x in vars(row).items() if isinstance(x, Tensor)}
    if isinstance(layer, KVCache):
        dtype = layer.k.dtype if layer.k.dtype == torch.bfloat16 else torch.float32
        wanted = {name: (dtype, (*shape[:2], layer.capacity, shape[3])) for name, (_, shape) in wanted.items()}
    tensors = {name: x for name, x in vars(layer).items() if isinstance(x, Tensor)}
    shapes = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items() if name != "mask"}
    return shapes == wanted and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors.values())


def tensors_of(layer: State) -> list[Tensor]:
    """The tensors of a layer's state that the kernel reads, whole."""
    if isinstance(layer, RowCaches):
        return [x for row in layer.rows for x in (row.k, row.v)]
    if isinstance(layer, HybridState):  # nothing fades there, and nothing is in slots
        return [layer.k, layer.v, layer.S, layer.z, layer.M, layer.count]
    return [x for x in vars(layer).values() if isinstance(x, Tensor)]
