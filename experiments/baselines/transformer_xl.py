"""Transformer-XL: segments with a memory of what stood before them."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.transformer_xl")
class TransformerXL(Baseline):
    """Softmax attention within a segment, and to a memory, the tokens before it, into which no gradient flows. The score is

        ((q_i + u)·k_j + (q_i + w)·W r_{i−j}) / √d,   r_n = (sin n ω, cos n ω),   u, w learned per head

    A call reads a whole sequence, so the memory of a segment is x itself with its gradient stopped: what a loop over segments
    would have kept. The weights of keys and values have gradients by way of the memory too. For decoders.
    O(t·(segment + memory)). Dai et al. 2019, section 3 (arXiv 1901.02860).

    segment: tokens in a segment, from the sequence's first on. memory: tokens before a segment that it sees.
    """

    decoder_only = True

    def __init__(
        self, hidden_size: int, num_heads: int, *, causal: bool, segment: int = 128, memory: int = 128, **options: Any
    ):
        if options.get("rotary") is not None:
            raise ValueError(f"{type(self).__name__} has relative positions of its own: leave rotary out.")
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.segment, self.memory = segment, memory
        self.r_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.u = nn.Parameter(torch.zeros(num_heads, 1, 1, self.head_dim))
        self.w = nn.Parameter(torch.zeros(num_heads, 1, 1, self.head_dim))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t, size = x.shape[1], self.segment
        rest = -t % size
        x, real = pad(x, (0, 0, 0, rest)), pad(real, (0, rest))
        q, k, v = (pad(y, (0, 0, 0, rest)).unflatten(2, (-1, size)) for y in (q, k, v))  # (b, h, n, size, d)
        old_k, old_v, known = self.past(x.detach(), real)
        k, v = torch.cat([old_k, k], 3), torch.cat([old_v, v], 3)  # (b, h, n, old + size, d)
        old = known.shape[-1]
        seen = torch.cat([known, real.unflatten(1, (-1, size))], -1)[:, None, :, None]
        seen = seen & torch.ones(size, old + size, dtype=torch.bool, device=x.device).tril(old)
        scores = (q + self.u) @ k.mT + shifted((q + self.w) @ self.positions(old + size, x))
        weights = (scores / self.head_dim**0.5).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1)
        return (weights @ v).flatten(2, 3)[:, :, :t]

    def past(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each segment remembers of x (b, n·size, hidden): keys, values (b, h, n, old, d), and whether there are such
        places, (b, n, old)."""
        k, v = self.keys_and_values(x)
        known = before(real[:, None, :, None], self.memory, self.segment)[:, 0, ..., 0]
        return before(k, self.memory, self.segment), before(v, self.memory, self.segment), known

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, h, t, d) each, of inputs that stand in a memory."""
        k = self.heads(self.k_proj(x), self.num_kv_heads, self.k_norm)
        v = self.heads(self.v_proj(x), self.num_kv_heads)
        groups = self.num_heads // self.num_kv_heads
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def positions(self, number: int, x: Tensor) -> Tensor:
        """W r, (h, 1, d, number), for the distances number − 1 … 0."""
        kind = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
        rates = torch.exp(torch.arange(0, self.hidden_size, 2, **kind) * (-math.log(10000) / self.hidden_size))
        angles = torch.arange(number - 1, -1, -1, **kind)[:, None] * rates
        r = self.r_proj(torch.cat([angles.sin(), angles.cos()], -1)[:, : self.hidden_size].to(x.dtype))  # (number, h·d)
        return r.unflatten(1, (self.num_heads, -1)).permute(1, 2, 0)[:, None]


def before(y: Tensor, number: int, step: int, skipped: int = 0) -> Tensor:
    """(b, h, n, number, d) of y (b, h, n·step, d): the places that end `skipped` before each multiple of `step`."""
    windows = pad(y, (0, 0, number + skipped, 0)).unfold(2, number, step)
    return windows[:, :, : y.shape[2] // step].mT


def shifted(scores: Tensor) -> Tensor:
    """From columns by falling distance to columns by key: row i of (…, s, c) moves s − 1 − i places to the left."""
    s, c = scores.shape[-2:]
    return pad(scores, (1, 0)).flatten(-2).unflatten(-1, (c + 1, s))[..., 1:, :].flatten(-2).unflatten(-1, (s, c))
