"""Sparse Transformer: two factorised patterns, strided or fixed, each for half of the heads."""

from typing import Any

import torch
from torch import Tensor

from experiments.baselines.blocks import banded, blocked, softmax_where, unblocked
from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.sparse_strided", fixed=False)
@register("baselines.sparse_fixed", fixed=True)
class SparseTransformer(Baseline):
    """Softmax attention to O(√t) keys per query, with a `stride` l of about √t; O(t·(l + t/l)).

    Child et al. 2019, section 4.3 (arXiv 1904.10509). Query i sees, itself included,

        strided:  keys at most l before it (first half of the heads); keys j with (i − j) mod l = 0 (second half)
        fixed:    keys of its block of l (first half); the last `summaries` c keys of every block (second half)

    causal: those at j ≤ i. Not causal, which the paper does not have: the same on both sides. In the second half of `fixed`, a
    query before the first summary sees nothing, and yields zeros. The paper's other forms of the same patterns, one per layer
    or both in each head, are left out.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        fixed: bool,
        stride: int = 32,
        summaries: int = 4,
        **options: Any,
    ):
        if num_heads % 2:
            raise ValueError(f"SparseTransformer has two patterns, each for half of the heads; got {num_heads} heads.")
        if not 0 < summaries <= stride:
            raise ValueError(f"summaries must be from 1 to stride = {stride}; got {summaries}.")
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.fixed, self.stride, self.summaries = fixed, stride, summaries

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        near, far = zip(*(y.chunk(2, dim=1) for y in (q, k, v)))
        if self.fixed:
            return torch.cat([self._own_block(*near, real), self._summaries(*far, real)], dim=1)
        local = banded(*near, self.stride, causal=self.causal, real=real)
        return torch.cat([local, self._same_remainder(*far, real)], dim=1)

    def _same_remainder(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """Attend along the columns of a table with rows of l tokens."""
        (b, _, t, _), l = q.shape, self.stride
        parts = (blocked(y, l).permute(0, 3, 2, 1, 4).flatten(0, 1) for y in (q, k, v))  # (b·l, h, n, d)
        seen = blocked(real, l).transpose(1, 2).flatten(0, 1)[:, None, None]  # (b·l, 1, 1, n)
        o = softmax_where(*parts, self._past(seen, seen.shape[-1]))
        return unblocked(o.unflatten(0, (b, l)).permute(0, 3, 2, 1, 4), t)

    def _own_block(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        (b, _, t, _), l = q.shape, self.stride
        parts = [blocked(y, l).flatten(0, 1) for y in (q, k, v)]  # (b·n, h, l, d)
        seen = blocked(real, l).flatten(0, 1)[:, None, None]
        o = softmax_where(*parts, self._past(seen, l))
        return unblocked(o.unflatten(0, (b, -1)), t)

    def _summaries(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t = q.shape[2]
        places = torch.arange(t, device=q.device)
        kept = places[places % self.stride >= self.stride - self.summaries]
        seen = real[:, None, None, kept]
        if self.causal:
            seen = seen & (kept <= places[:, None])
        return softmax_where(q, k[:, :, kept], v[:, :, kept], seen)

    def _past(self, seen: Tensor, n: int) -> Tensor:
        """A mask (…, 1, n) for n queries: with causality, (…, n, n)."""
        return seen & torch.ones(n, n, dtype=torch.bool, device=seen.device).tril() if self.causal else seen
