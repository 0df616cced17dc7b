"""A call of the delta rule of low rank, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import WithHeads


class LowRankFields(NamedTuple):
    """Six vectors per token and head, of which the state makes

        S_t = (Diag(e^g) + b aᵀ) S_{t−1} + k vᵀ        o = scale·S_tᵀ q

    rows: those of the batch, or the sequences that are packed into one row. At a token that key_mask leaves out nothing
    happens: no decay either.
    """

    q: Tensor  # (b, h, t, d)
    k: Tensor  # (b, h, t, d)
    v: Tensor  # (b, h, t, e)
    a: Tensor  # (b, h, t, d)  reads the state before its decay
    b: Tensor  # (b, h, t, d)  where what was read is written
    log_decay: Tensor | None = None  # (b, h, t) or (b, h, t, d), wide
    S: Tensor | None = None  # (rows, h, d, e), wide: the state before
    # so far as `Gradients` goes
    key_mask: Tensor | None = None  # (b, t)  bool
    cu_seqlens: Tensor | None = None  # (rows + 1,)
    scale: float = 1.0


class Outputs(NamedTuple):
    o: Tensor  # (b, h, t, e)  in the dtype of q
    S: Any  # (rows, h, d, e)  the state after, wide
    kept: Tensor | None = None  # states that a backend keeps for its own `backward`, as it likes, or None


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    log_decay: Any
    S: Any


class Call(WithHeads, LowRankFields):
    __slots__ = ()
    outputs, gradients = Outputs, Gradients
    in_time = ("q", "k", "v", "a", "b", "log_decay")

    @property
    def num_states(self) -> int:
        return self.q.shape[1]

    num_heads = num_states

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_sequences, self.num_states, self.q.shape[3], self.v.shape[3])
