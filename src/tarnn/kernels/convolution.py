"""A call of short convolution, and what it gives: the records that every backend takes and returns."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.numerics import wide

LARGEST_WIDTH = 31


class Call(NamedTuple):
    """Tokens x, one filter per channel, and what stands before them. n: rows, or sequences packed into one row."""

    x: Tensor  # (b, t, c)
    weight: Tensor  # (c, w) wide; the last number of a causal filter is that of the token itself
    bias: Tensor | None  # (c,) wide
    S: Tensor | None  # (n, w - 1, c), as x: the last tokens before, the oldest first; None: zeros
    # so far as `Gradients` goes
    key_mask: Tensor | None  # (b, t)  bool
    cu_seqlens: Tensor | None  # (n + 1,)
    causal: bool
    silu: bool  # the output is x / (1 + e^-x) of each sum

    @property
    def dtype(self) -> torch.dtype:
        """What sums are computed in."""
        return wide(self.x.dtype)

    @property
    def before(self) -> int:
        """How many tokens before its own a filter reaches: of a centred one of even width it is one less than after it."""
        return self.weight.shape[1] - 1 if self.causal else (self.weight.shape[1] - 1) // 2

    @property
    def num_sequences(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def cuts(self) -> list[int] | None:
        """Where packed sequences begin and end, or None. ValueError for bounds that don't cut the row."""
        return None if self.cu_seqlens is None else bounds(self.cu_seqlens, self.x.shape[1])

    def new_outputs(self) -> "Outputs":
        """Tensors to write outputs into, contiguous."""
        return Outputs(self.x.new_empty(self.x.shape), self.new_state())

    def new_state(self) -> Tensor:
        """To write the state behind the call into; a centred filter has none."""
        width = self.weight.shape[1] - 1 if self.causal else 0
        return self.x.new_empty(self.num_sequences, width, self.x.shape[2])


class Outputs(NamedTuple):
    o: Tensor  # (b, t, c)  zeros at masked tokens
    S: Any  # (n, w - 1, c)  the state behind; None where nobody asked for it


class Gradients(NamedTuple):
    x: Any
    weight: Any
    bias: Any
    S: Any
