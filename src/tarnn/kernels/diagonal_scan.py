"""A call of the diagonal scan, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.numerics import wide

IN_TIME = ("x", "log_decay")  # fields of a call with axes (b, t, …)


class Call(NamedTuple):
    """h ← e^log_decay ⊙ h + x, channel by channel. n: rows of the batch, or the sequences that are packed into one row."""

    x: Tensor  # (b, t, c)
    log_decay: Tensor  # (b, t, c)  of any floating type
    h: Tensor | None = None  # (n, c) wide  the state before
    # so far as `Gradients` goes
    key_mask: Tensor | None = None  # (b, t)  bool
    cu_seqlens: Tensor | None = None  # (n + 1,)

    @property
    def dtype(self) -> torch.dtype:
        """What the scan is computed in."""
        return wide(self.x.dtype)

    @property
    def num_sequences(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def cuts(self) -> list[int] | None:
        """Where packed sequences begin and end, or None. ValueError for bounds that don't cut the row."""
        return None if self.cu_seqlens is None else bounds(self.cu_seqlens, self.x.shape[1])

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_sequences, self.x.shape[2])

    def new_state(self) -> Tensor:
        """A state to write into."""
        return self.x.new_empty(self.state_shape, dtype=self.dtype)

    def new_outputs(self) -> "Outputs":
        """Tensors to write outputs into, contiguous."""
        return Outputs(self.x.new_empty(self.x.shape), self.new_state())

    def new_gradients(self, returned: Any = None) -> "Gradients":
        """Tensors to write gradients into, each in the type and layout of its input, but for the state's: contiguous."""
        h = None if self.h is None else self.new_state()
        return Gradients(torch.empty_like(self.x), torch.empty_like(self.log_decay), h)


class Outputs(NamedTuple):
    """What a call gives. `kept` is for a backend's own `backward`."""

    o: Tensor  # (b, t, c)  h at every token, zeros at masked ones
    h: Any  # (n, c) wide  the state behind; None where nobody asked for it
    kept: Tensor | None = None  # states that a backend keeps, as it likes


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    x: Any
    log_decay: Any
    h: Any
