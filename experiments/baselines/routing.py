"""Routing Transformer: tokens meet in clusters, whose centres are learned by online k-means."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

from experiments.baselines.blocks import banded, softmax_where
from experiments.baselines.interface import Baseline
from tarnn.attention import register


@register("baselines.routing")
class RoutingAttention(Baseline):
    """Softmax attention within `clusters` of w = ⌈t / clusters⌉ tokens each; O(t·w). Half of the heads see a window instead.

    Roy et al. 2020, algorithm 1 (arXiv 2003.05997). Queries and keys are normed (LayerNorm without weights). Each cluster takes
    the w queries and the w keys that are closest to its centre, so clusters are of one size; some tokens are in several, whose
    outputs are averaged, some in none and yield zeros. Centres follow the mean of the tokens nearest to them, by a moving
    average in training. With clusters ≈ √t the cost is O(t√t).

    Causal: keys are the queries themselves, and none later is seen. But which tokens a cluster takes depends on all of the row:
    as published, it is not causal. k_proj of the routed heads is then unused.
    """

    centres: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        clusters: int = 16,
        reach: int = 64,
        average: float = 0.999,
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.clusters, self.reach, self.average, self.local = clusters, reach, average, num_heads // 2
        centres = torch.randn(num_heads - self.local, clusters, self.head_dim)
        self.register_buffer("centres", normalize(centres, dim=-1))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        near, far = zip(*(y.tensor_split([self.local], dim=1) for y in (q, k, v)))
        routed = self._routed(*far, real)
        if not self.local:
            return routed
        return torch.cat([banded(*near, self.reach, causal=self.causal, real=real), routed], dim=1)

    def _routed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        q = layer_norm(q, q.shape[-1:])
        k = q if self.causal else layer_norm(k, k.shape[-1:])
        near_q, near_k = (normalize(y.detach(), dim=-1) @ self.centres.to(y).mT for y in (q, k))  # (b, h, t, c)
        i = self._members(near_q, real)  # (b, h, c, w): places, t where there is none
        j = i if self.causal else self._members(near_k, real)
        seen = (j < q.shape[2])[..., None, :]
        if self.causal:
            seen = seen & (j[..., None, :] <= i[..., None])
        parts = (_tokens(q, i), _tokens(k, j), _tokens(v, j), seen)
        o = softmax_where(*(y.flatten(1, 2) for y in parts)).unflatten(1, i.shape[1:3])
        if self.training:
            self._move(((near_q, q), (near_k, k)), real)
        return _mean(o, i, q.shape[2])

    def _members(self, nearness: Tensor, real: Tensor) -> Tensor:
        """The places of the tokens that each centre takes, in order; t for those of its w seats that a row does not fill."""
        t, width = nearness.shape[2], -(-nearness.shape[2] // self.clusters)
        nearness = nearness.masked_fill(~real[:, None, :, None], -torch.inf)
        places = nearness.topk(width, dim=2).indices.mT  # (b, h, c, w), the nearest first
        seats = -(-real.sum(-1) // self.clusters)  # (b,)
        none = torch.arange(width, device=places.device) >= seats[:, None]
        return places.masked_fill(none[:, None, None], t).sort(dim=-1).values

    @torch.no_grad()
    def _move(self, nearest: Any, real: Tensor) -> None:
        """Move each centre towards the mean of the tokens that are nearest to it, if there are any."""
        total = torch.zeros_like(self.centres)
        for nearness, y in nearest:
            own = nearness.argmax(-1)[..., None].expand_as(y)  # (b, h, t, d)
            y = (normalize(y, dim=-1) * real[:, None, :, None]).to(total)
            total += y.new_zeros(len(y), *total.shape).scatter_add(2, own, y).sum(0)
        mean = normalize(total, dim=-1)
        moved = normalize(self.average * self.centres + (1 - self.average) * mean, dim=-1)
        self.centres.copy_(torch.where(total.any(-1, keepdim=True), moved, self.centres))


def _tokens(y: Tensor, places: Tensor) -> Tensor:
    """y (b, h, t, d) at places (b, h, c, w): (b, h, c, w, d)."""
    flat = places.clamp(max=y.shape[2] - 1).flatten(2)[..., None]
    return y.gather(2, flat.expand(-1, -1, -1, y.shape[-1])).unflatten(2, places.shape[2:])


def _mean(o: Tensor, places: Tensor, t: int) -> Tensor:
    """The mean over clusters of what each token received, (b, h, t, e); zeros where a token is in none."""
    flat = places.flatten(2)[..., None]
    total = o.new_zeros(*o.shape[:2], t + 1, o.shape[-1]).scatter_add(
        2, flat.expand(*flat.shape[:3], o.shape[-1]), o.flatten(2, 3)
    )
    count = o.new_zeros(*o.shape[:2], t + 1, 1).scatter_add(2, flat, torch.ones_like(flat, dtype=o.dtype))
    return (total / count.clamp(min=1))[:, :, :t]
