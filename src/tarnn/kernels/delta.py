"""A call of the delta rule, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.numerics import wide

# fields of a call with axes (b, h, t, …); and of a call and its outputs with (rows, …), a row for each sequence
IN_TIME = ("q", "k", "v", "beta", "log_decay")
PER_SEQUENCE = ("S",)


class Call(NamedTuple):
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

    @property
    def dtype(self) -> torch.dtype:
        """What sums and states are computed in."""
        return wide(self.q.dtype)

    @property
    def has_channels(self) -> bool:
        """Whether the decay is one for each channel of the keys."""
        return self.log_decay is not None and self.log_decay.ndim == 4

    @property
    def num_states(self) -> int:
        """n, the heads of the state."""
        return max(self.k.shape[1], self.v.shape[1])

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def cuts(self) -> list[int] | None:
        """Where packed sequences begin and end, or None. ValueError for bounds that don't cut the row."""
        return None if self.cu_seqlens is None else bounds(self.cu_seqlens, self.q.shape[2])

    @property
    def side_by_side(self) -> bool:
        """Whether q is a view of (b, t, h·d), as a projection gives it. Then o is one of (b, t, heads·e)."""
        return self.q.stride(1) < self.q.stride(2)

    def new_o(self) -> Tensor:
        """To write o into: in the layout of q, so that heads merge without a copy."""
        b, heads, t, e = self.q.shape[0], max(self.q.shape[1], self.v.shape[1]), self.q.shape[2], self.v.shape[3]
        if self.side_by_side:
            return self.q.new_empty(b, t, heads, e).transpose(1, 2)
        return self.q.new_empty(b, heads, t, e)

    def new_state(self) -> Tensor:
        """S to write into."""
        shape = (self.num_sequences, self.num_states, self.k.shape[3], self.v.shape[3])
        return self.q.new_empty(shape, dtype=self.dtype)

    def new_outputs(self, *, state: bool = True) -> "Outputs":
        """Tensors to write outputs into; S is None without `state`."""
        return Outputs(self.new_o(), self.new_state() if state else None)

    def new_gradients(self, returned: Any, *, state: bool = True) -> "Gradients":
        """Tensors to write gradients into, that of S None without `state`.

        Those of q, k and v lie in memory as q, k and v do, in their dtype; the others are contiguous, in the wide dtype.
        """
        beta, decay = self.beta, self.log_decay
        return Gradients(
            torch.empty_like(self.q),
            torch.empty_like(self.k),
            torch.empty_like(self.v),
            beta.new_empty(beta.shape, dtype=self.dtype),
            None if decay is None else decay.new_empty(decay.shape, dtype=self.dtype),
            self.new_state() if state else None,
        )


class Outputs(NamedTuple):
    o: Tensor  # (b, max(h, m), t, e)  in the dtype of q
    S: Any  # (rows, n, d, e)  the state behind, wide
    kept: Tensor | None = None  # states that a backend keeps for its own `backward`, as it likes, or None


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have."""

    q: Any
    k: Any
    v: Any
    beta: Any
    log_decay: Any
    S: Any
