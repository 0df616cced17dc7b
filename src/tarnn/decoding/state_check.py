"""Whether a state is one that the fused step can write: of the model's kind, contiguous, on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.ops.softmax.rows import RowCaches


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
        wanted = row.map(lambda x: x.expand(batch_size, *x.shape[1:]))
        if isinstance(layer, RowCaches) and isinstance(row, KVCache):
            fits = len(layer.rows) == batch_size and all(_fits(x, row) and x.mask is None for x in layer.rows)
            fits = fits and len({x.k.dtype for x in layer.rows}) < 2
        else:
            fits = type(layer) is type(wanted) and _fits(layer, wanted)
        if not fits:
            raise UnfitState(
                f"the fused step takes states as model.new_state({batch_size}) makes them, contiguous and float32: "
                f"{wanted!r}; got {layer!r}."
            )


def _fits(layer: State, wanted: State) -> bool:
    """As wide, and as the kernel reads it; how long a cache is does not matter, and it may have a mask."""
    tensors, expected, dtypes = tensors_of(layer), tensors_of(wanted), [torch.float32]
    if isinstance(layer, KVCache):
        expected = [x.expand(-1, -1, layer.capacity, -1) for x in expected]
        dtypes.append(torch.bfloat16)
    numbers = [x for x in tensors if x.dtype != torch.bool]  # all but a cache's mask
    types = {x.dtype for x in numbers}
    return (
        [x.shape for x in numbers] == [x.shape for x in expected]
        and len(types) < 2
        and types.issubset(dtypes)
        and all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)
    )


def tensors_of(layer: State) -> list[Tensor]:
    """The tensors of a layer's state, whole."""
    if isinstance(layer, RowCaches):
        return [x for row in layer.rows for x in (row.k, row.v)]
    return [x for x in vars(layer).values() if isinstance(x, Tensor)]
