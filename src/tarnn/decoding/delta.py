"""A layer with the delta rule, as a plan describes it (csrc/model_step/delta.h computes it)."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.attention.gated_delta import GatedDeltaState
from tarnn.decoding.parts import Decay, Norm, Product, Shapes
from tarnn.kernels.cpu.model_step import DECAYS
from tarnn.kernels.cpu.products import PANEL, Block, padded
from tarnn.ops import State


class Delta(NamedTuple):
    """q, k, v = silu(filters of what is put in), S ← e^log_decay S corrected by β = strength·σ(x), norm(Sᵀq) ⊙ silu(gate x).

    As many queries as keys or as many values as keys, and multiples of that; each value head has a state.
    """

    heads: tuple[int, int, int, int, int]  # queries, keys, values; channels of a key, of a value
    inputs: tuple[Product, ...]  # queries, keys, values, the outputs' gate, β
    filters: Tensor  # (channels, width)
    output: Product
    norm: Norm
    decay: Decay = Decay()
    rate: Tensor | None = None  # (values,): what a decay of tokens is multiplied with
    strength: float = 1.0
    kept: int | None = None  # inputs of the filters that the state keeps, by default width − 1

    @property
    def kind(self) -> str:
        return "delta"

    def shapes(self, hidden: int) -> Shapes:
        queries, keys, values, d, e = self.heads
        outputs = max(queries, values) * e
        sizes = (queries * d, keys * d, values * e, outputs, values)
        for product, size in zip(self.inputs, sizes, strict=True):
            yield from product.shapes(size, hidden)
        yield from self.output.shapes(hidden, outputs)
        yield self.filters, (sum(sizes[:3]), self.filters.shape[-1])
        yield self.norm.gain, (e,)
        yield self.rate, (values,)
        yield from self.decay.shapes(values, d, hidden)

    def new_state(self) -> State:
        """One row of the state, without numbers."""
        _, _, values, d, e = self.heads
        channels, width = self.filters.shape
        kept = width - 1 if self.kept is None else self.kept
        return GatedDeltaState(
            *(torch.empty(shape, device="meta") for shape in ((1, values, d, e), (1, kept, channels)))
        )

    def write(self, block: Block, weights: str) -> None:
        """Into the block of weights and its plan, after the layer's kind, norms and feed-forward."""
        width = self.filters.shape[-1]
        block.numbers(*self.heads, width, width - 1 if self.kept is None else self.kept)
        block.place(padded(self.filters.float().mT, PANEL))
        block.numbers(DECAYS.index(self.decay.kind))
        block.place(torch.tensor((self.strength, self.norm.eps), dtype=torch.float64))
        block.vector(self.norm.gain)
        block.vector(self.decay.log_decay if self.decay.kind == "head" else self.rate)
        block.products([*self.inputs, *filter(None, [self.decay.rows])], weights)
        block.matrix(*self.output, weights)
        if self.decay.up is not None:
            block.heads(*self.decay.up.by_head(self.heads[2]))
