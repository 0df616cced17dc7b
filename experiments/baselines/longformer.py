"""Longformer: a sliding window, and a few global tokens with projections of their own."""

from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.blocks import banded, softmax_where
from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.longformer")
class Longformer(Baseline):
    """Softmax attention to the keys within `reach` on each side and to the first `global_tokens`, which see all; O(t·reach).

    Beltagy, Peters and Cohan 2020, section 3 (arXiv 2004.05150). The paper's window is 2·reach. Global tokens see by queries,
    keys and values of their own; all others see them by the ordinary ones, in one softmax with the window. Causal: nobody sees
    what comes after it, global tokens included.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, causal: bool, reach: int = 64, global_tokens: int = 1, **options: Any
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.reach, self.global_tokens = reach, global_tokens
        size, bias = num_heads * self.head_dim, self.q_proj.bias is not None
        if global_tokens:
            self.global_q_proj = nn.Linear(hidden_size, size, bias=bias)
            self.global_k_proj = nn.Linear(hidden_size, size, bias=bias)
            self.global_v_proj = nn.Linear(hidden_size, size, bias=bias)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t = x.shape[1]
        first = min(self.global_tokens, t)
        o = banded(q, k, v, self.reach, causal=self.causal, real=real, first=first)
        if not first:
            return o
        end = first if self.causal else t  # of what the global tokens see
        q = self.heads(self.global_q_proj(x[:, :first]), self.num_heads, self.q_norm)
        k = self.heads(self.global_k_proj(x[:, :end]), self.num_heads, self.k_norm)
        v = self.heads(self.global_v_proj(x[:, :end]), self.num_heads)
        seen = real[:, None, None, :end]
        if self.causal:
            seen = seen & torch.ones(first, first, dtype=torch.bool, device=x.device).tril()
        return torch.cat([softmax_where(q, k, v, seen), o[:, :, first:]], dim=2)
