"""BigBird: blocks that see their neighbours, the first and the last block, and a few random ones."""

from typing import Any

import torch
from torch import Tensor

from experiments.baselines.blocks import blocked, softmax_where, unblocked
from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.bigbird")
class BigBird(Baseline):
    """Softmax attention between blocks of tokens: 3 of a window, the first and the last, and `random_blocks`; O(t·block).

    Zaheer et al. 2020, section 2, with global tokens inside the sequence (arXiv 2007.14062). The first and the last block see
    all. Random blocks differ between layers, heads and blocks but stay the same through training; they are drawn, without
    replacement, among those that a block does not see anyhow.
    """

    encoder_only = True

    def __init__(
        self, hidden_size: int, num_heads: int, *, causal: bool, block: int = 32, random_blocks: int = 3, **options: Any
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.block, self.random_blocks = block, random_blocks
        self.register_buffer("seeds", torch.randint(2**31, (num_heads,)))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        h, t, size = self.num_heads, q.shape[2], self.block
        last = (real.sum(-1) - 1).clamp(min=0) // size  # (b,)
        queries, keys, values = (blocked(y, size).transpose(1, 2) for y in (q, k, v))  # (b, h, n, size, d)
        there = blocked(real, size)[:, None].expand(-1, h, -1, -1)[..., None]  # (b, h, n, size, 1)
        n = queries.shape[2]
        which, valid = self.blocks(n, last)  # (b, h, n, c)
        seen = _gathered(there, which)[..., 0].unflatten(-1, (-1, size)) & valid[..., None]
        parts = (queries, _gathered(keys, which), _gathered(values, which), seen.flatten(3)[..., None, :])
        o = softmax_where(*(y.flatten(1, 2) for y in parts)).unflatten(1, (h, n))
        for end in (torch.zeros_like(last), last):
            at = end[:, None, None, None, None]
            own = queries.gather(2, at.expand(-1, h, 1, *queries.shape[3:]))[:, :, 0]
            full = softmax_where(own, k, v, real[:, None, None])[:, :, None]
            o = torch.where(torch.arange(n, device=q.device)[:, None, None] == at, full, o)
        return unblocked(o.transpose(1, 2), t)

    def blocks(self, n: int, last: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks that each block sees (b, h, n, c), and which of these count: none twice, none that isn't there."""
        i = torch.arange(n, device=last.device)
        ends = torch.stack([torch.zeros_like(last), last], dim=-1)[:, None].expand(-1, n, -1)
        window = torch.stack([i - 1, i, i + 1], dim=-1).expand(len(last), -1, -1)
        which = torch.cat([ends, window], dim=-1)[:, None].expand(-1, self.num_heads, -1, -1)
        repeated = (which[..., None] == which[..., None, :]).tril(-1).any(-1)
        which = which.masked_fill(repeated | (which < 0) | (which > last[:, None, None, None]), n)
        for draw in range(self.random_blocks):
            which = torch.cat([which, self.random(which, last, draw)[..., None]], dim=-1)
        return which.clamp(max=n - 1), which < n

    def random(self, which: Tensor, last: Tensor, draw: int) -> Tensor:
        """A random block for each block (b, h, n) that is not among those in `which`; n, which is no block, if there is none."""
        n = which.shape[2]
        left = last[:, None, None] + 1 - (which < n).sum(-1)
        number = self.seeds[:, None] + torch.arange(n, device=last.device) * 2654435761 + draw * 40503
        for _ in range(3):  # spread the bits
            number = ((number ^ (number >> 17)) * 0x2545F491) & (2**40 - 1)
        block = number % left.clamp(min=1)
        for taken in which.sort(-1).values.unbind(-1):  # count those that are left
            block = block + (block >= taken)
        return block.masked_fill(left <= 0, n)


def _gathered(y: Tensor, which: Tensor) -> Tensor:
    """The tokens of those blocks of y (b, h, n, size, d): (b, h, n, c·size, d)."""
    index = which.flatten(2)[..., None, None].expand(-1, -1, -1, *y.shape[3:])
    return y.gather(2, index).unflatten(2, which.shape[2:]).flatten(3, 4)
