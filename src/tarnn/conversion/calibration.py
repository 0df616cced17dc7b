"""What each head of a pretrained model loses by hybrid attention, and the map and λ that make it least.

All of it looks at softmax attention as the model itself runs it (teacher-forced): a layer's inputs are those of the
original. Logits are formed block by block of queries, so that memory stays linear in the length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.conversion.capture import Seen
from tarnn.feature_maps.statistics import Spread, spread_of
from tarnn.numerics import widen
from tarnn.ops.features import features, log_features
from tarnn.units import full_units

BLOCK = 256
SAMPLED = 256  # queries of a row, for clusters
# added to the λ that meets the mean far log-weight: estimates that vary much are better believed less
TRUST = (-8.0, -6.0, -5.0, -4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5)


class Near(NamedTuple):
    """What is exact. Slots are not looked at in calibration: which keys they hold depends on what came before."""

    window: int
    sinks: int
    slots: int = 0


class Block(NamedTuple):
    """Some queries of a row and all keys of it: logits (h, c, t), −∞ where a key is not seen."""

    rows: slice
    exact: Tensor
    far: Tensor
    values: Tensor  # (h, t, e)


def blocks(seen: Seen, near: Near) -> Iterator[Block]:
    """The teacher's logits, exact ones and far ones apart, of a call with one row."""
    r, t = seen.q.shape[1] // seen.k.shape[1], seen.q.shape[2]
    q, k, v = (widen(x[0]) for x in (seen.q, seen.k, seen.v))
    k, v = k.repeat_interleave(r, 0), v.repeat_interleave(r, 0)
    j = torch.arange(t, device=q.device)
    for start in range(0, t, BLOCK):
        rows = slice(start, min(start + BLOCK, t))
        logits = seen.scale * q[:, rows] @ k.mT
        i = j[rows, None]
        visible = j <= i if seen.causal else torch.ones_like(j <= i)
        exact = visible & (((i - j).abs() < near.window) | (j < near.sinks))
        yield Block(rows, logits.masked_fill(~exact, -torch.inf), logits.masked_fill(~visible | exact, -torch.inf), v)


class Phi(NamedTuple):
    """Features of queries and keys (h, t, f), and the logarithms of their scales (h, t)."""

    q: Tensor
    a: Tensor
    k: Tensor
    b: Tensor


def estimate(feature_map: Any, seen: Seen) -> Phi:
    """What a map makes of a call with one row; key heads as often as query heads."""
    d, r = seen.q.shape[-1], seen.q.shape[1] // seen.k.shape[1]
    q = seen.q * (seen.scale * d**0.5)
    if feature_map.log_features:
        a: Tensor | None
        b: Tensor | None
        y, x = log_features(feature_map, q, "queries"), log_features(feature_map, seen.k, "keys")
        phi_q, phi_k, _, U, _ = full_units(y, x, x.new_full((*x.shape[:2], x.shape[3]), -torch.inf))
        a, b = U, None
    else:
        (phi_q, a), (phi_k, b) = features(feature_map, q, "queries"), features(feature_map, seen.k, "keys")
    a, b = (torch.zeros_like(x[..., 0]) if y is None else y for x, y in ((phi_q, a), (phi_k, b)))
    return Phi(phi_q[0], a[0], phi_k[0].repeat_interleave(r, 0), b[0].repeat_interleave(r, 0))


def far_logits(block: Block, phi: Phi) -> Tensor:
    """The estimated logits of the far keys, (h, c, t)."""
    products = (phi.q[:, block.rows] @ phi.k.mT).clamp(min=torch.finfo(phi.q.dtype).tiny).log()
    logits = products + phi.a[:, block.rows, None] + phi.b[:, None]
    return logits.masked_fill(block.far == -torch.inf, -torch.inf)


def mean_of(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax's mean of the values (h, c, e), and the log of its denominator (h, c); zeros and −∞ where nothing is seen."""
    log_weight = logits.logsumexp(-1)
    shift = log_weight.masked_fill(log_weight == -torch.inf, 0.0)
    return (logits - shift[..., None]).exp() @ values, log_weight


def share(far: Tensor, exact: Tensor) -> Tensor:
    """ρ, from log-weights: 0 where nothing is far."""
    return torch.sigmoid(far - exact).masked_fill(far == -torch.inf, 0.0)


@dataclass
class Layer:
    """What is gathered of one layer, sums over texts; errors are squared distances to the teacher's output, per query
    head (h,)."""

    spreads: tuple[Spread, Spread] | None = None
    feature_map: Any = None
    queries_of_rows: list[Tensor] = field(default_factory=list)  # some, (g, n, d)
    gap: Any = 0.0  # the teacher's far log-weight less the estimated one
    queries: Any = 0  # that have far keys
    rows: int = 0  # queries
    bias: Any = 0.0  # λ
    norm: Any = 0.0  # |output|²
    window: Any = 0.0
    wide: Any = 0.0  # a window enlarged by the bytes of the features
    features: Any = field(default_factory=lambda: 0.0)  # (trust, h)
    far_share: Any = field(default_factory=lambda: 0.0)  # (trust, h): of the estimate
    teacher_share: Any = 0.0
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)  # h, g, d, e

    def see_spread(self, seen: Seen, full: bool) -> None:
        self.heads = _, g, d, _ = heads_of(seen)
        q = seen.q * (seen.scale * d**0.5)
        some = torch.linspace(0, q.shape[2] - 1, min(q.shape[2], SAMPLED), device=q.device).long()
        self.queries_of_rows.append(q[0, :, some].unflatten(0, (g, -1)).flatten(1, 2))
        found = tuple(spread_of(x, g, full=full).over_batch() for x in (q, seen.k))
        if self.spreads is not None:
            found = tuple(a.merged(b) for a, b in zip(self.spreads, found))
        self.spreads = found[0], found[1]

    def see_gap(self, seen: Seen, near: Near) -> None:
        """For λ: how far the mean log-weight of the far keys is from the estimated one."""
        phi = estimate(self.feature_map, seen)
        for block in blocks(seen, near):
            some = (block.far > -torch.inf).any(-1)
            gap = block.far.logsumexp(-1) - far_logits(block, phi).logsumexp(-1)
            self.gap = self.gap + gap.masked_fill(~some, 0.0).sum(-1)
            self.queries = self.queries + some.sum(-1)

    def see_errors(self, seen: Seen, near: Near, wide: Near) -> None:
        phi = None if self.feature_map is None else estimate(self.feature_map, seen)
        self.heads = heads_of(seen)
        self.rows += seen.q.shape[2]
        for block, wider in zip(blocks(seen, near), blocks(seen, wide)):
            o_exact, exact = mean_of(block.exact, block.values)
            o_far, far = mean_of(block.far, block.values)
            rho = share(far, exact)
            o = o_exact + rho[..., None] * (o_far - o_exact)
            self.norm = self.norm + _square(o)
            self.teacher_share = self.teacher_share + rho.sum(-1)
            self.window = self.window + _square(o_exact - o)
            if phi is None:
                continue
            self.wide = self.wide + _square(mean_of(wider.exact, block.values)[0] - o)
            o_phi, estimated = mean_of(far_logits(block, phi), block.values)
            trust = torch.tensor(TRUST, device=o.device)[:, None, None]
            rho = share(estimated + self.bias[:, None] + trust, exact)  # (trust, h, c)
            found = o_exact + rho[..., None] * (o_phi - o_exact)
            self.features = self.features + _square(found - o)
            self.far_share = self.far_share + rho.sum(-1)

    def settle_bias(self) -> None:
        self.bias = self.gap / self.queries.clamp(min=1)


def heads_of(seen: Seen) -> tuple[int, int, int, int]:
    return seen.q.shape[1], seen.k.shape[1], seen.q.shape[3], seen.v.shape[3]


def _square(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))
