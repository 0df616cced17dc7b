"""Frames through strided convolutions: positions overlap, and see what is near them."""

from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from tarnn.models.frames import Frames
from tarnn.models.state import ModelState

WIDTH = 5  # frames that one convolution sees
STRIDE = 2


class ConvolvedFrames(Frames):
    """Convolutions over 5 frames with stride 2, each with a GELU, until `subsampling` frames are one position; then a matrix.

    causal: a position sees its own frames and those before, so that a stream may be read in pieces of any multiple of
    `subsampling` frames; else as many on either side. Beyond a row's ends there are zeros, in each convolution.
    """

    def __init__(self, input_size: int, width: int, subsampling: int, *, causal: bool):
        super().__init__(input_size, width, subsampling)
        self.causal = causal
        inputs = [input_size, *[width] * (int(log2(subsampling)) - 1)]
        self.convolutions: Any = nn.ModuleList(nn.Conv1d(n, width, WIDTH, STRIDE) for n in inputs)

    def proj_inputs(self, width: int) -> int:
        return width

    def positions(self, frames: Float[Tensor, "b t n"], mask: Tensor | None) -> Float[Tensor, "b p width"]:
        before = WIDTH - STRIDE if self.causal else WIDTH // 2
        x = frames.mT
        for convolution in self.convolutions:
            x = self._convolved(convolution, pad(x, (before, 0)), x.shape[2])
            if mask is not None:
                mask = mask[:, ::STRIDE]
                x = x.masked_fill(~mask[:, None], 0.0)
        return self.proj(x.mT)

    def prefill(
        self, frames: Float[Tensor, "b t n"], state: tuple[Tensor, ...]
    ) -> tuple[Float[Tensor, "b p width"], tuple[Tensor, ...]]:
        if not self.causal:
            raise ValueError(
                "a stream needs a model that sees what came before alone; this one's config has causal=False."
            )
        x, after = self.checked(frames).mT, []
        for convolution, last in zip(self.convolutions, state, strict=True):
            whole = torch.cat([last, x], 2)
            after.append(whole[:, :, -last.shape[2] :])
            x = self._convolved(convolution, whole, x.shape[2])
        return self.proj(x.mT), tuple(after)

    def new_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The last inputs of each convolution, (b, ·, 3)."""
        weights = (x.weight for x in self.convolutions)
        return tuple(x.new_zeros(batch_size, x.shape[1], WIDTH - STRIDE) for x in weights)

    def _convolved(self, convolution: nn.Module, x: Tensor, num_frames: int) -> Tensor:
        """x (b, ·, t): so many frames with what stands before them; ⌈num_frames / 2⌉ come out."""
        num_out = -(-num_frames // STRIDE)
        needed = max(STRIDE * num_out + WIDTH - STRIDE, WIDTH)  # of a piece without frames nothing comes out
        return gelu(convolution(pad(x, (0, needed - x.shape[2]))))[:, :, :num_out]


@dataclass(frozen=True, eq=False, repr=False)
class StreamState(ModelState):
    """A `ModelState`, and the last inputs of each convolution in front."""

    frames: tuple[Float[Tensor, "b n before"], ...] = ()

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(x.nbytes for x in self.frames)
