"""Reformer's attention: queries that are their own keys, sorted by hash, in chunks that also see the one before."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from experiments.baselines.interface import Baseline
from tarnn.attention import register

SELF = -1e5  # the score of a token with itself, which it sees only where it sees nothing else


@register("baselines.lsh")
class LshAttention(Baseline):
    """Softmax over the keys that share a bucket with the query in one of `rounds` random hashes; O(t·chunk·rounds).

    Kitaev, Kaiser and Levskaya 2020, section 2 (arXiv 2001.04451). In each round tokens are sorted by (bucket, place) and cut
    into chunks. A query sees the keys of its bucket that stand in its own chunk or the one before, with scores q_i·q_j/|q_j|.
    A pair that meets in N rounds has 1/N of its weight in each, so the rounds, merged by log-sum-exp, are one softmax over
    the union. About two buckets per chunk; a bucket is a pair of hashes, so that hashing costs O(t·√(t/chunk)).

    Rotations are drawn anew in each training step. Causal: no query sees a later key. But which earlier ones it sees depends on
    where the borders of chunks fall, and so on later tokens' buckets: as published, it is not causal.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, causal: bool, chunk: int = 32, rounds: int = 4, **options: Any
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        del self.k_proj
        self.k_norm = None
        self.chunk, self.rounds = chunk, rounds

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.heads(self.q_proj(x), self.num_heads, self.q_norm)
        return q, q, self.heads(self.v_proj(x), self.num_kv_heads)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        t, missing = q.shape[2], -q.shape[2] % self.chunk
        bucket = pad(self.buckets(q.detach(), real), (0, missing), value=2**62)  # (b, h, r, t): the last are no tokens
        order = bucket.argsort(dim=-1, stable=True)
        place = order.argsort(dim=-1)  # of each token in each round's order
        q, k, v = (pad(y, (0, 0, 0, missing)) for y in (q, normalize(k, dim=-1), v))
        q, k, v = (self._sorted(y, order) for y in (q, k, v))  # (b, h, r, n, chunk, d)
        i = order.unflatten(-1, (-1, self.chunk))
        j = look_back(i, fill=-1)
        score = q @ look_back(k).mT
        itself = i[..., None] == j[..., None, :]
        seen, meetings = self.visible(i, j, bucket, place)
        seen = seen & (j >= 0)[..., None, :]
        if self.causal:
            seen = seen & (j[..., None, :] <= i[..., None])
        score = (score - meetings.to(score.dtype).log()).masked_fill(~seen, -torch.inf).masked_fill(itself, SELF)
        o, total = score.softmax(-1) @ look_back(v), score.logsumexp(-1, keepdim=True)
        o, total = (self._unsorted(y, place)[..., :t, :] for y in (o, total))  # (b, h, r, t, ·)
        return (o * total.softmax(2)).sum(2)

    def buckets(self, q: Tensor, real: Tensor) -> Tensor:
        """The bucket of each token (b, h, r, t) in each round; of what is no token, one behind all others."""
        (_, h, _, d), lengths = q.shape, real.sum(-1)
        bits = torch.frexp((2 * (lengths // self.chunk)).clamp(min=1).double()).exponent.long() - 1  # (b,)
        bucket = torch.zeros((), dtype=torch.int64, device=q.device)
        columns = 2 ** max(int(bits.max() + 1) // 2 - 1, 0)
        rotations = self.draw(columns, 2, h, self.rounds, d).to(q)
        for half, rotation in zip((bits // 2, bits - bits // 2), rotations.unbind(1)):
            rotated = torch.einsum("bhtd,chrd->bhrtc", q, rotation)
            unused = torch.arange(columns, device=q.device) >= (2**half)[:, None] // 2  # (b, columns)
            rotated = rotated.masked_fill(unused[:, None, None, None], 0.0)
            bucket = bucket * 2 * columns + torch.cat([rotated, -rotated], dim=-1).argmax(-1)
        return bucket.masked_fill(~real[:, None, None], 2**61)

    def visible(self, i: Tensor, j: Tensor, bucket: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Which keys j (…, 2·chunk) the queries i (…, chunk) see in each round, and in how many they do."""
        meetings, chunk = torch.zeros((), dtype=torch.uint8, device=i.device), (place // self.chunk).int()
        seen = None
        for r in range(self.rounds):
            (a, b), (c, d) = (
                (self._at(y[:, :, r], i)[..., None], self._at(y[:, :, r], j)[..., None, :]) for y in (bucket, chunk)
            )
            meet = (a == b) & ((c == d) | (c == d + 1))  # (b, h, rounds, n, chunk, 2·chunk)
            meetings = meetings + meet
            own = torch.arange(self.rounds, device=i.device)[:, None, None, None] == r
            seen = meet & own if seen is None else seen | (meet & own)
        return seen, meetings.clamp(min=1)

    def _at(self, of_tokens: Tensor, index: Tensor) -> Tensor:
        """What (b, h, t) holds for the tokens of (b, h, r, n, m)."""
        flat = index.flatten(2).clamp(min=0)
        return of_tokens.gather(2, flat).view_as(index)

    def _sorted(self, y: Tensor, order: Tensor) -> Tensor:
        """(b, h, t, d) → chunks of each round's order (b, h, r, n, chunk, d)."""
        y = y[:, :, None].expand(-1, -1, order.shape[2], -1, -1)
        return y.gather(3, order[..., None].expand(*order.shape, y.shape[-1])).unflatten(3, (-1, self.chunk))

    def _unsorted(self, y: Tensor, place: Tensor) -> Tensor:
        y = y.flatten(3, 4)
        return y.gather(3, place[..., None].expand_as(y))


def look_back(y: Tensor, fill: float = 0) -> Tensor:
    """Chunks of (b, h, r, n, m) or (b, h, r, n, m, d) behind those before them, 2·m long; `fill` before the first."""
    before = torch.cat([torch.full_like(y[:, :, :, :1], fill), y[:, :, :, :-1]], dim=3)
    return torch.cat([before, y], dim=4)
