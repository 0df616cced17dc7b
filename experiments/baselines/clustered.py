"""Clustered attention: one row of weights per cluster of queries; improved: exact weights for its best keys."""

from typing import Any

import torch
from torch import Tensor

from experiments.baselines.interface import Baseline
from tarnn.attention import register

BLOCK = 32  # queries of one cluster that are computed together


@register("baselines.clustered", top_keys=0)
@register("baselines.improved_clustered", top_keys=32)
class ClusteredAttention(Baseline):
    """Softmax attention of `clusters` mean queries, given to the members of each cluster; O(t·clusters).

    Vyas, Katharopoulos and Fleuret 2020, sections 3.2 and 3.3 (arXiv 2007.04825). Queries are hashed to `bits` signs of random
    products and clustered by k-means in Hamming space. Improved: on the `top_keys` k keys that a cluster weighs most, each
    query has its own softmax, scaled to the weight that the cluster has there (m̂); the rest is the cluster's.
    Hyperplanes are drawn anew in each training step. k-means starts from queries at equal distances in the row.
    """

    encoder_only = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        clusters: int = 32,
        top_keys: int = 32,
        bits: int = 63,
        rounds: int = 10,
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.clusters, self.top_keys, self.bits, self.rounds = clusters, top_keys, bits, rounds

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        cluster = self.cluster(q.detach(), real)  # (b, h, t)
        scale, least = q.shape[-1] ** -0.5, torch.finfo(q.dtype).min
        centres = self._sums(q, cluster, real) / self._sums(torch.ones_like(q[..., :1]), cluster, real).clamp(min=1)
        weights = (centres @ k.mT * scale).masked_fill(~real[:, None, None], least).softmax(-1)  # (b, h, c, t)
        kept = min(self.top_keys, k.shape[2])
        if not kept:
            return _taken(weights @ v, cluster)
        share, top = weights.topk(kept, dim=-1)  # (b, h, c, kept)
        rest = weights.scatter(-1, top, 0.0) @ v
        keys, values = (_taken(y, top.flatten(2)).unflatten(2, top.shape[2:]).flatten(3) for y in (k, v))
        slot, of_block = self._blocks(cluster)
        keys, values, share = (_taken(y, of_block) for y in (keys, values, share))  # of each block of queries
        queries = q.new_zeros(*q.shape[:2], of_block.shape[2] * BLOCK, q.shape[3])
        queries = queries.scatter(2, slot[..., None].expand_as(q), q).unflatten(2, (-1, BLOCK))
        score = scale * queries @ keys.unflatten(3, (kept, -1)).mT  # (b, h, n, BLOCK, kept)
        own = score.masked_fill((share == 0)[..., None, :], least).softmax(-1) * share.sum(-1)[..., None, None]
        return _taken((own @ values.unflatten(3, (kept, -1))).flatten(2, 3), slot) + _taken(rest, cluster)

    def _blocks(self, cluster: Tensor) -> tuple[Tensor, Tensor]:
        """Lay queries out in blocks of one cluster each: each query's slot (b, h, t), each block's cluster (b, h, n)."""
        number = torch.arange(self.clusters, device=cluster.device)
        order = cluster.argsort(dim=-1, stable=True)
        members = (cluster[..., None] == number).sum(2)  # (b, h, c)
        blocks = -(-members // BLOCK)
        start = (blocks.cumsum(-1) - blocks) * BLOCK - (members.cumsum(-1) - members)
        slot = order.argsort(dim=-1) + start.gather(2, cluster)
        of_block = cluster.new_zeros(*cluster.shape[:2], -(-cluster.shape[2] // BLOCK) + self.clusters)
        return slot, of_block.scatter(2, slot // BLOCK, cluster)

    def cluster(self, q: Tensor, real: Tensor) -> Tensor:
        """The cluster of each query (b, h, t): k-means of the signs of random products."""
        signs = torch.where(q @ self.draw(self.bits, q.shape[-1]).to(q).mT > 0, 1.0, -1.0)  # (b, h, t, bits)
        first = torch.arange(self.clusters, device=q.device) * real.sum(-1, keepdim=True) // self.clusters  # (b, c)
        centres = signs.gather(2, first[:, None, :, None].expand(-1, q.shape[1], -1, self.bits))
        cluster = (signs @ centres.mT).argmax(-1)
        for _ in range(self.rounds):
            total = self._sums(signs, cluster, real)
            centres = torch.where(total == 0, centres, total.sign())
            cluster = (signs @ centres.mT).argmax(-1)
        return cluster

    def _sums(self, y: Tensor, cluster: Tensor, real: Tensor) -> Tensor:
        """Sums over the members of each cluster, (b, h, c, d)."""
        y = y * real[:, None, :, None]
        zeros = y.new_zeros(*y.shape[:2], self.clusters, y.shape[-1])
        return zeros.scatter_add(2, cluster[..., None].expand_as(y), y)


def _taken(y: Tensor, index: Tensor) -> Tensor:
    """y (b, h, s, d) at an index (b, h, t): (b, h, t, d)."""
    return y.gather(2, index[..., None].expand(-1, -1, -1, y.shape[-1]))
