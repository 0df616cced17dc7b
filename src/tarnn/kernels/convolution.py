"""A call of short convolution, and what it gives: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import AlongTime

LARGEST_WIDTH = 31


class ConvolutionFields(NamedTuple):
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


class Outputs(NamedTuple):
    o: Tensor  # (b, t, c)  zeros at masked tokens
    S: Any  # (n, w - 1, c)  the state after the call; None unless requested


class Gradients(NamedTuple):
    x: Any
    weight: Any
    bias: Any
    S: Any


class Call(AlongTime, ConvolutionFields):
    __slots__ = ()

    @property
    def before(self) -> int:
        """How many tokens before its own a filter reaches: of a centred one of even width it is one less than after it."""
        return self.weight.shape[1] - 1 if self.causal else (self.weight.shape[1] - 1) // 2

    def new_outputs(self) -> Outputs:
        """Return outputs to write into, contiguous."""
        return Outputs(self.x.new_empty(self.x.shape), self.new_state())

    def new_state(self) -> Tensor:
        """Return the state after the call to write into; a centred filter has none."""
        width = self.weight.shape[1] - 1 if self.causal else 0
        return self.x.new_empty(self.num_sequences, width, self.x.shape[2])
