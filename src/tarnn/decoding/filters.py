"""A convolution along time as a part of a plan; csrc/model_step/filters.h computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.decoding.parts import Product, Shapes
from tarnn.kernels.cpu.products import PANEL, Block, padded
from tarnn.ops import ConvolutionState, State


class Filters(NamedTuple):
    """W silu(bias + Σ_l weight_l x_(i − p + l)): a filter of each channel, then a product that mixes the channels."""

    weight: Tensor  # (hidden, width)
    bias: Tensor
    output: Product
    kind: str = "filters"

    def shapes(self, hidden: int) -> Shapes:
        yield self.weight, (hidden, self.weight.shape[1])
        yield self.bias, (hidden,)
        yield from self.output.shapes(hidden, hidden)

    def new_state(self) -> State:
        """One row of the state, without numbers."""
        channels, width = self.weight.shape
        return ConvolutionState(torch.empty(1, width - 1, channels, device="meta"))

    def write(self, block: Block, weights: str) -> None:
        """As csrc/model_step/layer_plans.h reads it."""
        block.numbers(self.weight.shape[1])
        block.place(padded(self.weight.float().mT, PANEL))
        block.vector(self.bias)
        block.matrix(*self.output, weights)
