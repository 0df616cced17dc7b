"""A call in segments: what a part of its queries and keys are, in the wide dtype, with features and weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.eager.weights import Weights, chunk_weights
from tarnn.kernels.features import features
from tarnn.kernels.linear import Call

CHUNK = 64
CHUNK_WITH_CHANNELS = 16  # its (c × c) weights have a third axis, f
SEGMENT = 1 << 18  # elements of φ(K) a segment: 1 MB in float32, so that temporaries stay in cache
SEGMENT_MIN = 256  # positions: bounds the states kept during backward to t/256


class Segment(NamedTuple):
    """Positions start:stop as n chunks of c."""

    start: int
    stop: int
    n: int
    c: int


class Queries(NamedTuple):
    x: Tensor  # (b, g, n, r, c, d)
    phi: Tensor  # (b, g, n, r, c, f)
    scale: Tensor | None  # (b, g, n, r, c)  φ(q) = phi · e^scale


class Keys(NamedTuple):
    x: Tensor  # (b, g, n, c, d)
    phi: Tensor  # (b, g, n, c, f)  0 where masked
    v: Tensor  # (b, g, n, c, e + 1)  [v | 1], v = 0 where masked
    scale: Tensor | None  # (b, g, n, c)  φ(k) = phi · e^scale


class Segments:
    """A call in the making of its segments. r = h/g query heads share a key/value head."""

    def __init__(self, call: Call):
        self.call, self.dtype = call, call.dtype
        mask = call.key_mask
        self.masked = None if mask is None else ~mask[:, None]  # (b, 1, s)
        decay, weight = (None if x is None else x.to(self.dtype) for x in (call.log_decay, call.key_log_weight))
        if decay is not None:
            decay = decay if call.has_channels else decay[..., None]  # (b, g, s, x)
            if self.masked is not None:  # a masked key is absent: no time passes at it
                decay = decay.masked_fill(self.masked[..., None], 0.0)
        self.log_decay, self.key_log_weight = decay, weight

    def initial_state(self) -> tuple[Tensor, Tensor | None]:
        """S' = [S | z] (b, g, f, e + 1) and M (b, g), None where nothing has a log-weight."""
        call = self.call
        b, g, f = *call.v.shape[:2], call.num_features
        if call.S is None or call.z is None:
            state = call.k.new_zeros(b, g, f, call.v.shape[3] + 1, dtype=self.dtype)
        else:
            state = torch.cat([call.S, call.z[..., None]], dim=-1)
        if call.weighted and call.M is None:
            return state, state.new_full((b, g), -torch.inf if call.S is None else 0.0)
        return state, call.M

    def of(self, length: int) -> list[Segment]:
        """The segments of `length` positions."""
        b, g = self.call.v.shape[:2]
        per_segment = max(SEGMENT_MIN, SEGMENT // max(1, b * g * self.call.num_features))
        if not self.call.causal:
            return [Segment(i, min(i + per_segment, length), 1, -1) for i in range(0, length, per_segment)]
        c = CHUNK_WITH_CHANNELS if self.call.has_channels else CHUNK
        n = max(1, per_segment // c)
        whole = length - length % c
        cuts = [*range(0, whole, n * c), whole]
        found = [Segment(a, b, (b - a) // c, c) for a, b in zip(cuts, cuts[1:])]
        return found + ([Segment(whole, length, 1, length - whole)] if whole < length else [])

    def queries(self, at: Segment) -> Queries:
        x = self.call.for_values(self.call.q[:, :, at.start : at.stop])
        x = x.unflatten(1, (self.call.v.shape[1], self.call.num_heads // self.call.v.shape[1]))
        x = x.unflatten(3, (at.n, at.c)).transpose(2, 3).to(self.dtype)
        return Queries(x, *call_features(self.call, x))

    def keys(self, at: Segment) -> Keys:
        x, v = (y.to(self.dtype) for y in (self.call.for_values(_chunks(self.call.k, at)), _chunks(self.call.v, at)))
        if self.masked is not None:  # whatever stands there, NaN too, gets nowhere
            masked = _chunks(self.masked, at)[..., None]
            x, v = x.masked_fill(masked, 0.0), v.masked_fill(masked, 0.0)
        phi, scale = call_features(self.call, x)
        if self.masked is not None:
            phi = phi.masked_fill(masked, 0.0)
        return Keys(x, phi, torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1), scale)

    def weights(self, at: Segment, keys: Keys, M: Tensor | None) -> Weights:
        """The factors of a causal segment."""
        log_decay = None if self.log_decay is None else _chunks(self.log_decay, at)
        return chunk_weights(log_decay, self.key_weight(at, keys) if self.call.weighted else None, M)

    def key_weight(self, at: Segment, keys: Keys) -> Tensor:
        """w (b, g, n, c): the log-weight given and the scale of the features, −∞ where masked."""
        w = keys.x.new_zeros(keys.x.shape[:-1])
        w = w if self.key_log_weight is None else w + _chunks(self.key_log_weight, at)
        w = w if keys.scale is None else w + keys.scale
        return w if self.masked is None else w.masked_fill(_chunks(self.masked, at), -torch.inf)


def _chunks(x: Tensor, at: Segment) -> Tensor:
    """(b, g, s, …) at a segment, (b, g, n, c, …)."""
    return x[:, :, at.start : at.stop].unflatten(2, (at.n, at.c))


def call_features(call: Call, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """φ of x (b, g, …, c, d) in the wide dtype, and its log-scale or None."""
    phi, scale = features(call.function, x if call.omega is None else _projected(call, x))
    return (phi + call.shift if call.shift else phi), scale


def _projected(call: Call, x: Tensor) -> Tensor:
    """factor·Ω x + β − square·|x|² + offset."""
    assert call.omega is not None
    u = call.factor * (x @ spread_over(call.omega, x).mT) + call.offset
    u = u if call.bias is None else u + spread_over(call.bias, x)[..., None, :]
    return u - call.square * x.square().sum(-1, keepdim=True) if call.square else u


def spread_over(y: Tensor, x: Tensor) -> Tensor:
    """A parameter of the projection, (b, g, …), with axes for what x has between heads and positions."""
    if y.shape[:2] == (1, 1):
        return y[0, 0].to(x.dtype)
    return y.to(x.dtype).reshape(*y.shape[:2], *[1] * (x.ndim - 4), *y.shape[2:])
