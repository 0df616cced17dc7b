"""Attention along the edges of a graph (GAT)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.graph")
class GraphAttention(Baseline):
    """o_i = Σ_j softmax_j(LeakyReLU(a·v_i + c·v_j)) v_j over the neighbours j of node i, and i itself; a, c learned per head.

    A sequence is the nodes of a graph: position i is node i. Edges go both ways; those of nodes behind the sequence's end are
    left out, and so are masked nodes. There are no queries and keys: one projection makes v. For encoders. O(t + edges).
    Veličković et al. 2018, eq. 3–6 (arXiv 1710.10903).

    edges: pairs of nodes; None: those at distances 1, 2, 4, 8 …, a graph for a sequence of any length.
    """

    encoder_only = True
    edges: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        edges: Sequence[Sequence[int]] | Tensor | None = None,
        slope: float = 0.2,
        **options: Any,
    ):
        if options.get("rotary") is not None:
            raise ValueError("the nodes of a graph have no order that rotary positions could count: leave rotary out.")
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        del self.q_proj, self.k_proj
        self.q_norm = self.k_norm = None
        self.slope = slope
        self.a = nn.Parameter(torch.randn(num_heads, 1, self.head_dim) / self.head_dim**0.5)
        self.c = nn.Parameter(torch.randn(num_heads, 1, self.head_dim) / self.head_dim**0.5)
        if edges is not None:
            pairs = torch.as_tensor(edges, dtype=torch.long, device="cpu").reshape(-1, 2)
            edges = torch.cat([pairs, pairs.flip(1)])[(pairs[:, 0] != pairs[:, 1]).repeat(2)].unique(dim=0).T
        self.register_buffer("edges", edges)  # (2, e): a node, and whom it sees

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = self.heads(self.v_proj(source), self.num_kv_heads)
        return v, v, v

    def _rows(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Nodes stay where they are: moving the real ones to the front would give them other numbers."""
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        return self.attend(x, q, k, v.masked_fill(~real[:, None, :, None], 0.0), real)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t = x.shape[1]
        edges = distances(t).to(x.device) if self.edges is None else self.edges[:, (self.edges < t).all(0)]
        node, other = torch.cat([edges, torch.arange(t, device=x.device).expand(2, t)], 1)  # (e,) each
        scores = leaky_relu((v * self.a).sum(-1)[..., node] + (v * self.c).sum(-1)[..., other], self.slope)  # (b, h, e)
        scores = scores.masked_fill(~(real[:, node] & real[:, other])[:, None], -torch.inf)
        most = torch.full_like(v[..., 0], -torch.inf)
        most = most.scatter_reduce(2, node.expand_as(scores), scores.detach(), "amax").clamp(
            min=torch.finfo(v.dtype).min
        )
        weights = (scores - most[..., node]).exp()
        sums = torch.zeros_like(v[..., 0]).index_add(2, node, weights)
        o = torch.zeros_like(v).index_add(2, node, weights[..., None] * v[:, :, other])
        return o / sums.masked_fill(sums == 0, 1)[..., None]


def distances(t: int) -> Tensor:
    """(2, e): each of t positions, and those at distances 1, 2, 4, 8 … on both sides."""
    steps = [2**i for i in range(t.bit_length()) if 2**i < t]
    after = [torch.stack([torch.arange(t - n), torch.arange(n, t)]) for n in steps]
    return torch.cat([*after, *(pair.flip(0) for pair in after), torch.zeros(2, 0, dtype=torch.long)], 1)
