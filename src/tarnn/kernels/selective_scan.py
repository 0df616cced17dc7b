"""A call of the selective scan, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import Recurrent


class SelectiveFields(NamedTuple):
    """h ← e^(dt A) ⊙ h + dt x Bᵀ, o = h C + D x, for every channel. r: rows of the batch, or the sequences that are packed into
    one row. Tensors may be of different floating types."""

    x: Tensor  # (b, t, c)
    dt: Tensor  # (b, t, c)
    A: Tensor  # (c, n)
    B: Tensor  # (b, t, n)
    C: Tensor  # (b, t, n)
    D: Tensor | None = None  # (c,)
    h: Tensor | None = None  # (r, c, n) wide  the state before
    # so far as `Gradients` goes
    key_mask: Tensor | None = None  # (b, t)  bool
    cu_seqlens: Tensor | None = None  # (r + 1,)


class Outputs(NamedTuple):
    """Results of a call. `kept` is for a backend's own `backward`."""

    o: Tensor  # (b, t, c)  zeros at masked tokens
    h: Any  # (r, c, n) wide  the state after the call; None unless requested
    kept: Tensor | None = None  # states that a backend keeps, as it likes


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    h: Any


class Call(Recurrent, SelectiveFields):
    __slots__ = ()
    outputs, gradients, in_time = Outputs, Gradients, ("x", "dt", "B", "C")

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_sequences, *self.A.shape)
