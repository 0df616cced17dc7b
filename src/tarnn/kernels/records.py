"""Properties that the records of calls along time share: precision, packed sequences, and tensors to write results into.

A record is `class Call(Recurrent, …Fields)`: the fields are a named tuple whose first field is an input, and the class
states how its tensors lie. It stays a named tuple, so that `*call` is its flattened form (`contract.py`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.numerics import wide


class AlongTime:
    """Calls whose first field has an axis of time, and that have `cu_seqlens`."""

    __slots__ = ()
    time_axis: ClassVar[int] = 1

    @property
    def dtype(self: Any) -> torch.dtype:
        """The dtype of sums and states."""
        return wide(self[0].dtype)

    @property
    def num_sequences(self: Any) -> int:
        """Rows of the batch, or sequences packed into one row."""
        return self[0].shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def cuts(self: Any) -> list[int] | None:
        """Where packed sequences begin and end, or None. ValueError for bounds that don't cut the row."""
        return None if self.cu_seqlens is None else bounds(self.cu_seqlens, self[0].shape[self.time_axis])


class Recurrent(AlongTime):
    """Calls with one state per sequence, of `state_shape`, whose outputs begin with o and the state after the call."""

    __slots__ = ()
    outputs: ClassVar[Any]  # the record of outputs
    gradients: ClassVar[Any]  # the record of gradients, named as the first fields of the call
    in_time: ClassVar[tuple[str, ...]]  # fields with an axis of time
    per_sequence: ClassVar[tuple[str, ...]] = ("h",)  # fields, of the outputs too, with a row for each sequence
    small: ClassVar[tuple[str, ...]] = ()  # fields, beside states, whose gradients are summed in the wide dtype
    state_shape: Any  # a property

    def new_o(self: Any) -> Tensor:
        """Return a tensor to write o into, contiguous."""
        return self[0].new_empty(self[0].shape)

    def new_state(self: Any) -> Any:
        """Return a state to write into."""
        return self[0].new_empty(self.state_shape, dtype=self.dtype)

    def new_outputs(self: Any, *, state: bool = True) -> Any:
        """Return outputs to write into; the state is None without `state`."""
        return self.outputs(self.new_o(), self.new_state() if state else None)

    def new_gradients(self: Any, returned: Any = None) -> Any:
        """Return gradients to write into, None for what the call does not have.

        They lie in memory as their inputs do, in their dtype; those of states and of `small` are contiguous and wide.
        """
        wide_ones, pairs = (*self.per_sequence, *self.small), zip(self.gradients._fields, self)
        return self.gradients(
            *[
                x if x is None else x.new_empty(x.shape, dtype=self.dtype) if name in wide_ones else torch.empty_like(x)
                for name, x in pairs
            ]
        )


class WithHeads(Recurrent):
    """Calls of queries q (b, h, t, d), values v (b, ·, t, e) and log_decay, with output heads `num_heads`."""

    __slots__ = ()
    time_axis = 2
    per_sequence: ClassVar[tuple[str, ...]] = ("S",)
    small: ClassVar[tuple[str, ...]] = ("beta", "log_decay")
    num_heads: Any  # a property

    @property
    def has_channels(self: Any) -> bool:
        """Whether there is one decay per channel of the keys."""
        return self.log_decay is not None and self.log_decay.ndim == 4

    @property
    def side_by_side(self: Any) -> bool:
        """Whether q is a view of (b, t, h·d), as a projection gives it. Then o is a view of (b, t, heads·e)."""
        return self.q.stride(1) < self.q.stride(2)

    def new_o(self: Any) -> Tensor:
        """Return a tensor to write o into, in the layout of q, so that heads merge without a copy, and the dtype of v."""
        (b, _, t, _), heads, e = self.q.shape, self.num_heads, self.v.shape[3]
        if self.side_by_side:
            return self.v.new_empty(b, t, heads, e).transpose(1, 2)
        return self.v.new_empty(b, heads, t, e)
