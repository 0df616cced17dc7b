"""Compressive Transformer: what leaves Transformer-XL's memory is kept in fewer places."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import avg_pool1d, max_pool1d, scaled_dot_product_attention

from experiments.baselines.transformer_xl import TransformerXL, before
from tarnn.attention import register

POOLS = {"mean": avg_pool1d, "max": max_pool1d}


@register("baselines.compressive")
class CompressiveTransformer(TransformerXL):
    """Transformer-XL with a second memory, in which `rate` tokens that left the first have one place.

    The compression f, a convolution or a pooling of the layer's inputs, learns by a loss of its own and by nothing else; it
    adds itself in the backward pass. All projections held fast, attention to what was compressed should answer as
    attention to it did before, without positions:

        loss = mean |attention(x, old) − attention(x, f(old))|²

    Positions count places, in either memory. For decoders. Rae et al. 2019, algorithms 1 and 2 (arXiv 1911.05507).

    compressed: places of the second memory. compression: "convolution", "mean" or "max".
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        segment: int = 128,
        memory: int = 128,
        compressed: int = 128,
        rate: int = 4,
        compression: str = "convolution",
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, segment=segment, memory=memory, **options)
        if segment % rate or memory % rate or memory < segment:
            raise ValueError(
                "segment and memory must be multiples of rate, and the memory must hold a segment; got segment = "
                f"{segment}, memory = {memory}, rate = {rate}."
            )
        if compression not in ("convolution", *POOLS):
            raise ValueError(f"compression must be convolution, mean or max; got {compression!r}.")
        self.compressed, self.rate, self.pool = compressed, rate, POOLS.get(compression)
        self.conv = nn.Conv1d(hidden_size, hidden_size, rate, stride=rate) if self.pool is None else None

    def past(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, known = super().past(x, real)
        fewer = (self.pool(x.mT, self.rate) if self.conv is None else self.conv(x.mT)).mT  # (b, t/rate, hidden)
        whole = real.unflatten(1, (-1, self.rate)).all(-1)[:, None, :, None]
        where = (self.compressed, self.segment // self.rate, self.memory // self.rate)
        older_k, older_v = (before(y, *where) for y in self.keys_and_values(fewer.detach()))
        if self.conv is not None and torch.is_grad_enabled():
            v = AddLoss.apply(v, self.reconstruction(x, real, fewer))
        known = torch.cat([before(whole, *where)[:, 0, ..., 0], known], -1)
        return torch.cat([older_k, k], 3), torch.cat([older_v, v], 3), known

    def reconstruction(self, x: Tensor, real: Tensor, fewer: Tensor) -> Tensor:
        """The loss of what each segment drives out of the memory; 0 for a sequence that drives nothing out."""
        q, stays = self.fixed("q", x).unflatten(2, (-1, self.segment)), self.memory - self.segment
        answers = []
        for source, each in ((x, 1), (fewer, self.rate)):
            k, v = (
                before(self.fixed(name, source), self.segment // each, self.segment // each, stays // each)
                for name in "kv"
            )
            answers.append(scaled_dot_product_attention(q, k, v))
        counted = real.unflatten(1, (-1, self.segment))[:, None, :, :, None].clone()
        counted[:, :, : -(-self.memory // self.segment)] = False  # so early nothing leaves
        errors = (answers[0].detach() - answers[1]).square() * counted
        return errors.sum() / (counted.sum() * self.num_heads * self.head_dim).clamp(min=1)

    def fixed(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values of x, (b, h, t, d), whose weights learn nothing from it."""
        number = self.num_heads if name == "q" else self.num_kv_heads
        y, norm = self.heads(hold(getattr(self, f"{name}_proj"), x), number), getattr(self, f"{name}_norm", None)
        return (y if norm is None else hold(norm, y)).repeat_interleave(self.num_heads // number, 1)


def hold(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), in which its parameters are constants."""
    return functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, (x,))


class AddLoss(torch.autograd.Function):
    """x as it is; who differentiates by way of x differentiates the loss too, with a weight of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.one
