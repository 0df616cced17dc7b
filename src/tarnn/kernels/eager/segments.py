"""A call in segments: its queries and keys in the wide dtype, with features; and the weights of decays and log-weights.

Weights are factors between a chunk's queries, its keys and the state. For chunk positions i ≥ j, with w_j the key's
log-weight and D_ij = Σ_{j<l≤i} log_decay_l,

    M_i     = max(M_in + D_i0, max_j (w_j + D_ij))      running maximum: a constant under autograd, and it cancels
    pair_ij = e^(w_j + D_ij − M_i)       key j as query i sees it
    query_i = e^(M_in + D_i0 − M_i)      the state before the chunk as query i sees it (D_i0: all decay up to i)
    key_j   = e^(w_j + D_cj − M_out)     key j as it enters the state after the chunk
    keep    = e^(M_in + D_c0 − M_out)    the state before the chunk in the state after it

so every factor is ≤ 1. D is summed term by term, never as a difference of prefix sums: a decay of −∞ (a reset)
or −10⁶ costs its neighbours no digits. A decay with channels has D (…, f); then M uses the largest channel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.features import features
from tarnn.kernels.linear import Call
from tarnn.numerics import finite

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


class Weights(NamedTuple):
    """All None for a plain sum. x is 1, or f where the decay has channels; n chunks of c positions."""

    pair: Tensor | None = None  # (b, g, n, c, c, x), 0 above the diagonal
    query: Tensor | None = None  # (b, g, n, c, x)
    key: Tensor | None = None  # (b, g, n, c, x)
    keep: Tensor | None = None  # (b, g, n, x)
    M: Tensor | None = None  # (b, g, n, c)  M_i, with 0 in the place of −∞ (no key so far)
    M_out: Tensor | None = None  # (b, g)     after the last chunk; may be −∞


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


# --- weights


def chunk_weights(log_decay: Tensor | None, w: Tensor | None, M: Tensor | None) -> Weights:
    """log_decay (b, g, n, c, x) or None, w (b, g, n, c) or None, M (b, g) the maximum before, None without w."""
    if log_decay is None and w is None:
        return Weights()
    if log_decay is None:
        assert w is not None
        log_decay = torch.zeros_like(w)[..., None]
    between, since = decay_sums(log_decay)  # (b, g, n, c, c, x), (b, g, n, c, x)
    to_end = between[..., -1, :, :]
    if w is None:
        return Weights(between.exp(), since.exp(), to_end.exp(), since[..., -1, :].exp())
    assert M is not None, "log-weights need the maximum before them"
    # a log-weight that is not finite is in no maximum: earlier rows would see it there
    M_rows, M_in, M_out = _running_max(log_decay, w.nan_to_num(-torch.inf, -torch.inf, -torch.inf), M)
    rows, last = finite(M_rows), finite(M_rows[..., -1])
    return Weights(
        (between + (w[..., None, :] - rows[..., :, None])[..., None]).exp(),
        (M_in[..., None, None] + since - rows[..., None]).exp(),
        (w[..., None] + to_end - last[..., None, None]).exp(),
        (M_in[..., None] + since[..., -1, :] - last[..., None]).exp(),
        rows,
        M_out,
    )


def decay_sums(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """D_ij (…, c, c, x), −∞ above the diagonal, and D_i0 (…, c, x), both summed term by term."""
    c = log_decay.shape[-2]
    lower = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).tril()
    terms = log_decay[..., :, None, :].masked_fill(~lower.tril(-1)[..., None], 0.0)  # row l, column j: j < l
    return terms.cumsum(-3).masked_fill(~lower[..., None], -torch.inf), log_decay.cumsum(-2)


@torch.no_grad()
def _running_max(log_decay: Tensor, w: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M_i (b, g, n, c), M before each chunk (b, g, n), and M after the last (b, g)."""
    between, since = decay_sums(log_decay.amax(-1, keepdim=True))
    local = (between.squeeze(-1) + w[..., None, :]).amax(-1)  # (b, g, n, c): over the chunk's own keys
    since = since.squeeze(-1)
    before = [M]
    for n in range(w.shape[2]):
        before.append(torch.maximum(before[-1] + since[:, :, n, -1], local[:, :, n, -1]))
    M_in = torch.stack(before[:-1], dim=2)
    return torch.maximum(M_in[..., None] + since, local), M_in, before[-1]
