"""Mamba-2's layer as a part of a plan (Dao and Gu 2024, arXiv 2405.21060); csrc/model_step/ssd.h has its formulas."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.attention.mamba2 import Mamba2State
from tarnn.decoding.parts import Norm, Product, Shapes
from tarnn.kernels.cpu.products import PANEL, Block, padded
from tarnn.ops import State


class Ssd(NamedTuple):
    """Short filters, a state per head that fades by each token's own step, and a norm of gated outputs."""

    heads: int
    groups: int  # heads of a group share B and C
    filtered: Product  # x (heads·p), B and C (groups·n each)
    gate: Product  # z (heads·p)
    steps: Product  # dt (heads)
    output: Product
    filters: Tensor  # (channels, width)
    filter_bias: Tensor | None
    step_bias: Tensor  # (heads,), as A and D
    A: Tensor  # less than 0
    D: Tensor
    norm: Norm
    kept: int  # inputs that the state keeps, width − 1 at least
    kind: str = "ssd"

    @property
    def inner(self) -> int:
        return self.output.weight.shape[1]

    @property
    def state_size(self) -> int:
        """The width of B and C."""
        return (len(self.filters) - self.inner) // (2 * self.groups)

    def shapes(self, hidden: int) -> Shapes:
        h, channels = self.heads, self.inner + 2 * self.groups * self.state_size
        inner = h * max(1, self.inner // h)
        for product, outputs in ((self.filtered, channels), (self.gate, inner), (self.steps, h)):
            yield from product.shapes(outputs, hidden)
        yield from self.output.shapes(hidden, inner)
        yield self.filters, (channels, self.filters.shape[1])
        yield self.filter_bias, (channels,)
        yield self.norm.gain, (inner,)
        for x in (self.step_bias, self.A, self.D):
            yield x, (h,)

    def new_state(self) -> State:
        """One row of the state, without numbers."""
        S = torch.empty(1, self.heads, self.state_size, self.inner // self.heads, device="meta")
        return Mamba2State(S, S.new_empty(1, self.kept, len(self.filters)))

    def write(self, block: Block, weights: str) -> None:
        """As csrc/model_step/layer_plans.h reads it."""
        block.numbers(self.heads, self.groups, self.inner // self.heads, self.state_size)
        block.numbers(self.filters.shape[1], self.kept)
        for x in (self.step_bias, self.A, self.D, self.norm.gain):
            block.vector(x)
        block.place(torch.tensor([self.norm.eps], dtype=torch.float64))
        block.place(padded(self.filters.float().mT, PANEL))
        block.vector(self.filters.new_zeros(len(self.filters)) if self.filter_bias is None else self.filter_bias)
        block.products([self.filtered, self.gate, self.steps], weights)
        block.matrix(*self.output, weights)
