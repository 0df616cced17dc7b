"""A call of the diagonal scan, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import Recurrent


class DiagonalFields(NamedTuple):
    """h ← e^log_decay ⊙ h + x, channel by channel. n: rows of the batch, or the sequences that are packed into one row."""

    x: Tensor  # (b, t, c)
    log_decay: Tensor  # (b, t, c)  of any floating type
    h: Tensor | None = None  # (n, c) wide  the state before
    # so far as `Gradients` goes
    key_mask: Tensor | None = None  # (b, t)  bool
    cu_seqlens: Tensor | None = None  # (n + 1,)


class Outputs(NamedTuple):
    """Results of a call. `kept` is for a backend's own `backward`."""

    o: Tensor  # (b, t, c)  h at every token, zeros at masked ones
    h: Any  # (n, c) wide  the state after the call; None unless requested
    kept: Tensor | None = None  # states that a backend keeps, as it likes


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    x: Any
    log_decay: Any
    h: Any


class Call(Recurrent, DiagonalFields):
    __slots__ = ()
    outputs, gradients, in_time = Outputs, Gradients, ("x", "log_decay")

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_sequences, self.x.shape[2])
