"""A call of the delta rule, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import WithHeads


class DeltaFields(NamedTuple):
    """Queries (b, h, t, d), keys (b, g, t, d) and values (b, m, t, e), with a state for each head of n = max(g, m):

        S_t = (I − β k kᵀ) e^g S + β k vᵀ        o = scale·S_tᵀ q

    Either m is a multiple of g = h, and state j has the query and key head j // (m/g); or h is a multiple of g = m, and
    query head i reads state i // (h/g). rows: those of the batch, or the sequences that are packed into one row.
    At a key that key_mask leaves out nothing happens: no decay either.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # (b, n, t), wide
    log_decay: Tensor | None = None  # (b, n, t) or (b, n, t, d), wide
    S: Tensor | None = None  # (rows, n, d, e), wide: the state before
    # so far as `Gradients` goes
    key_mask: Tensor | None = None  # (b, t)  bool
    cu_seqlens: Tensor | None = None  # (rows + 1,)
    scale: float = 1.0
    norm_eps: float | None = None  # None: q and k are taken as they are, else as x/√(Σx² + norm_eps)


class Outputs(NamedTuple):
    o: Tensor  # (b, max(h, m), t, e)  in the dtype of q
    S: Any  # (rows, n, d, e)  the state after, wide
    kept: Tensor | None = None  # states that a backend keeps for its own `backward`, as it likes, or None


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    q: Any
    k: Any
    v: Any
    beta: Any
    log_decay: Any
    S: Any


class Call(WithHeads, DeltaFields):
    __slots__ = ()
    outputs, gradients = Outputs, Gradients
    in_time = ("q", "k", "v", "beta", "log_decay")

    @property
    def num_states(self) -> int:
        """n, the heads of the state."""
        return max(self.k.shape[1], self.v.shape[1])

    @property
    def num_heads(self) -> int:
        return max(self.q.shape[1], self.v.shape[1])

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_sequences, self.num_states, self.k.shape[3], self.v.shape[3])
