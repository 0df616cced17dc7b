"""RWKV-7's layer as a part of a plan (Peng et al. 2025, arXiv 2503.14456); csrc/model_step/rwkv7.h has its formulas."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.attention.rwkv7_layer import Rwkv7State
from tarnn.attention.token_shift import RwkvState
from tarnn.decoding.parts import Norm, Product, Shapes
from tarnn.kernels.cpu.products import PANEL, Block, padded
from tarnn.ops import State


class Rwkv7(NamedTuple):
    """A state per head under a delta rule of low rank; its products read mixtures of a token's input and the one before."""

    heads: int
    mixtures: Tensor  # (6, hidden), of r, w, k, v, a, g
    inputs: tuple[Product, Product, Product]  # r, k, v
    low: tuple[
        tuple[Product, Product] | None, ...
    ]  # of w, a, g, v; None for v: values are not mixed with those of the first layer
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    norm: Norm
    output: Product
    mixes_mlp: bool = False  # whether the feed-forward after it reads a mixture, too
    kind: str = "rwkv7"

    def shapes(self, hidden: int) -> Shapes:
        width = len(self.k_k)
        yield self.mixtures, (6, hidden)
        for product in self.inputs:
            yield from product.shapes(self.heads * (width // self.heads), hidden)
        for down, up in filter(None, self.low):
            yield from down.shapes(len(down.weight), hidden)
            yield from up.shapes(width, len(down.weight))
        for tensor in (self.k_a, self.r_k, self.norm.gain, self.norm.bias):
            yield tensor, (width,)
        yield from self.output.shapes(hidden, width)

    def new_state(self) -> State:
        """One row of the state, without numbers."""
        d = len(self.k_k) // self.heads
        S, last = torch.empty(1, self.heads, d, d, device="meta"), torch.empty(1, self.mixtures.shape[1], device="meta")
        return RwkvState(S, last, last) if self.mixes_mlp else Rwkv7State(S, last)

    def write(self, block: Block, weights: str) -> None:
        """As csrc/model_step/layer_plans.h reads it. Products of low rank are few bytes that decays need: at least bfloat16."""
        low = "float32" if weights == "float32" else "bfloat16"
        block.numbers(self.heads, len(self.k_k) // self.heads)
        block.place(padded(self.mixtures.float(), PANEL))
        for x in (self.k_k, self.k_a, self.r_k, self.norm.gain, self.norm.bias):
            block.vector(x)
        block.place(torch.tensor([self.norm.eps], dtype=torch.float64))
        for product in self.inputs:
            block.matrix(*product, weights)
        for pair in self.low:
            block.numbers(0 if pair is None else len(pair[0].weight))
            if pair is not None:
                down, up = pair
                block.matrix(*down, low)
                block.heads(*up.by_head(self.heads), low)
        block.matrix(*self.output, weights)
