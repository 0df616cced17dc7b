"""A call of the delta rule of low rank, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.numerics import wide

# fields of a call with axes (b, h, t, …); and of a call and its outputs with (rows, …), a row for each sequence
IN_TIME = ("q", "k", "v", "a", "b", "log_decay")
PER_SEQUENCE = ("S",)


class Call(NamedTuple):
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

    @property
    def dtype(self) -> torch.dtype:
        """What sums and states are computed in."""
        return wide(self.q.dtype)

    @property
    def has_channels(self) -> bool:
        """Whether the decay is one for each channel of the keys."""
        return self.log_decay is not None and self.log_decay.ndim == 4

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_states(self) -> int:
        return self.q.shape[1]

    def cuts(self) -> list[int] | None:
        """Where packed sequences begin and end, or None. ValueError for bounds that don't cut the row."""
        return None if self.cu_seqlens is None else bounds(self.cu_seqlens, self.q.shape[2])

    @property
    def side_by_side(self) -> bool:
        """Whether the heads of q lie beside each other in memory, as a projection leaves them."""
        return self.q.stride(1) < self.q.stride(2)

    def new_o(self) -> Tensor:
        """To write o into: in the layout of q, so that heads merge without a copy."""
        (b, h, t, _), e = self.q.shape, self.v.shape[3]
        if self.side_by_side:
            return self.q.new_empty(b, t, h, e).transpose(1, 2)
        return self.q.new_empty(b, h, t, e)

    def new_state(self) -> Tensor:
        """S to write into."""
        shape = (self.num_sequences, self.q.shape[1], self.q.shape[3], self.v.shape[3])
        return self.q.new_empty(shape, dtype=self.dtype)

    def new_outputs(self, *, state: bool = True) -> "Outputs":
        """Tensors to write outputs into; S is None without `state`."""
        return Outputs(self.new_o(), self.new_state() if state else None)

    def new_gradients(self, returned: Any, *, state: bool = True) -> "Gradients":
        """Tensors to write gradients into, that of S None without `state`.

        Those of vectors lie in memory as the vectors do, in their dtype; the others are contiguous, in the wide dtype.
        """
        decay = self.log_decay
        decays = None if decay is None else decay.new_empty(decay.shape, dtype=self.dtype)
        vectors = [torch.empty_like(x) for x in (self.q, self.k, self.v, self.a, self.b)]
        return Gradients._make((*vectors, decays, self.new_state() if state else None))


class Outputs(NamedTuple):
    o: Tensor  # (b, h, t, e)  in the dtype of q
    S: Any  # (rows, h, d, e)  the state behind, wide
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
