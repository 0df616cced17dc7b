"""Linear attention in plain PyTorch, any device: the backend that is always there.

Time is cut into segments, a segment into n chunks of c positions. Within a chunk the (c × c) products of
queries and keys are masked; across chunks the state S' = [S | z] runs on, v' = [v | 1]:

    P  = (φ(Q) φ(K)ᵀ) ⊙ pair                   o' = P v' + (query ⊙ φ(Q)) S'_in      o = o'[:e] / (o'[e] + eps)
    S'_out = keep · S'_in + (key ⊙ φ(K))ᵀ v'

and, with G' the gradient of o' and R' that of S'_out (eq. 13–15 of Katharopoulos et al. 2020, by chunks),

    dφ(Q) = (G'v'ᵀ ⊙ pair) φ(K) + query ⊙ G'S'_inᵀ        R'_in = keep · R' + (query ⊙ φ(Q))ᵀ G'
    dφ(K) = (G'v'ᵀ ⊙ pair)ᵀ φ(Q) + key ⊙ v'R'ᵀ            dv' = PᵀG' + (key ⊙ φ(K)) R'

The factors pair, query, key and keep (`weights.py`) are 1 for a plain sum. Features and sums are float32
(float64 for float64 inputs). Kept for backward: q, k, v, o and the denominator, one number a query. Features
are computed again; beside the results lives one segment's worth of temporaries, and one state a segment.

`forward` is made of differentiable operations, so the second derivative is autograd through it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.features import features, features_backward
from tarnn.kernels.weights import Weights, chunk_weights, finite
from tarnn.numerics import wide

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


@dataclass
class Call:
    """One call's inputs, handed out segment by segment. r = h/g query heads share a key/value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    feature_map: str
    causal: bool
    normalize: bool
    eps: float
    key_mask: Tensor | None
    log_decay: Tensor | None
    key_log_weight: Tensor | None
    S: Tensor | None
    z: Tensor | None
    M: Tensor | None
    omega: Tensor | None = (
        None  # (1 or b, 1 or g, f, d): features of factor·Ω x + β − square·|x|² + offset, plus shift
    )
    bias: Tensor | None = None  # (1 or b, 1 or g, f)
    factor: float = 1.0
    square: float = 0.0
    offset: float = 0.0
    shift: float = 0.0
    wants_omega: bool = False  # in backward: the gradients of omega and bias

    def __post_init__(self):
        self.dtype = wide(self.q.dtype)
        self.weighted = self.key_log_weight is not None or self.M is not None or self.feature_map == "exp"

    @property
    def num_features(self) -> int:
        return self.k.shape[3] if self.omega is None else self.omega.shape[2]

    def initial_state(self) -> tuple[Tensor, Tensor | None]:
        """S' = [S | z] (b, g, f, e + 1) and M (b, g), None where nothing has a log-weight."""
        b, g, f = *self.k.shape[:2], self.num_features
        if self.S is None or self.z is None:
            state = self.k.new_zeros(b, g, f, self.v.shape[3] + 1, dtype=self.dtype)
        else:
            state = torch.cat([self.S, self.z[..., None]], dim=-1)
        if self.weighted and self.M is None:
            return state, state.new_full((b, g), -torch.inf if self.S is None else 0.0)
        return state, self.M

    def segments(self, length: int) -> list[Segment]:
        per_segment = max(
            SEGMENT_MIN, SEGMENT // max(1, self.k.shape[0] * self.k.shape[1] * self.num_features)
        )
        if not self.causal:
            return [Segment(i, min(i + per_segment, length), 1, -1) for i in range(0, length, per_segment)]
        has_channels = self.log_decay is not None and self.log_decay.ndim == 4
        c = CHUNK_WITH_CHANNELS if has_channels else CHUNK
        n = max(1, per_segment // c)
        whole = length - length % c
        cuts = [*range(0, whole, n * c), whole]
        found = [Segment(a, b, (b - a) // c, c) for a, b in zip(cuts, cuts[1:])]
        return found + ([Segment(whole, length, 1, length - whole)] if whole < length else [])

    def queries(self, at: Segment) -> Queries:
        x = self.q[:, :, at.start : at.stop].unflatten(1, (self.k.shape[1], -1)).unflatten(3, (at.n, at.c))
        x = x.transpose(2, 3).to(self.dtype)
        phi, scale = self.features(x)
        return Queries(x, phi, scale)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """φ of x (b, g, n[, r], c, d), and its log-scale or None."""
        u = x if self.omega is None else self._projected(x)
        phi, scale = features(self.feature_map, u)
        return (phi + self.shift if self.shift else phi), scale

    def _projected(self, x: Tensor) -> Tensor:
        """factor·Ω x + β − square·|x|² + offset."""
        assert self.omega is not None
        u = self.factor * (x @ self._spread_over(self.omega, x).mT) + self.offset
        u = u if self.bias is None else u + self._spread_over(self.bias, x)[..., None, :]
        return u - self.square * x.square().sum(-1, keepdim=True) if self.square else u

    @staticmethod
    def _spread_over(y: Tensor, x: Tensor) -> Tensor:
        """A parameter of the projection, (b, g, …), with axes for what x has between heads and positions."""
        if y.shape[:2] == (1, 1):
            return y[0, 0].to(x.dtype)
        return y.to(x.dtype).view(*y.shape[:2], *[1] * (x.ndim - 4), *y.shape[2:])

    def keys(self, at: Segment) -> Keys:
        x = self.k[:, :, at.start : at.stop].unflatten(2, (at.n, at.c)).to(self.dtype)
        v = self.v[:, :, at.start : at.stop].unflatten(2, (at.n, at.c)).to(self.dtype)
        phi, scale = self.features(x)
        if self.key_mask is not None:
            masked = ~self._mask(at)[..., None]
            phi, v = phi.masked_fill(masked, 0.0), v.masked_fill(masked, 0.0)
        return Keys(x, phi, torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1), scale)

    def weights(self, at: Segment, keys: Keys, M: Tensor | None) -> Weights:
        """The factors of a causal segment."""
        log_decay = self.log_decay
        if log_decay is not None:
            log_decay = log_decay[:, :, at.start : at.stop].unflatten(2, (at.n, at.c)).to(self.dtype)
            log_decay = log_decay if log_decay.ndim == 5 else log_decay[..., None]
            if self.key_mask is not None:  # a masked key is absent: no time passes at it
                log_decay = log_decay.masked_fill(~self._mask(at)[..., None], 0.0)
        return chunk_weights(log_decay, self.key_weight(at, keys) if self.weighted else None, M)

    def key_weight(self, at: Segment, keys: Keys) -> Tensor:
        """w (b, g, n, c): the log-weight given and the scale of the features, −∞ where masked."""
        w = keys.x.new_zeros(keys.x.shape[:-1])
        if self.key_log_weight is not None:
            w = w + self.key_log_weight[:, :, at.start : at.stop].unflatten(2, (at.n, at.c)).to(self.dtype)
        w = w if keys.scale is None else w + keys.scale
        return w if self.key_mask is None else w.masked_fill(~self._mask(at), -torch.inf)

    def _mask(self, at: Segment) -> Tensor:
        assert self.key_mask is not None
        return self.key_mask[:, None, at.start : at.stop].unflatten(2, (at.n, at.c))


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o (b, h, t, e), denominator (b, h, t), S (b, g, f, e), z (b, g, f), M (b, g)).

    M is zero where nothing has a log-weight; the denominator is in units of e^M, as the sums are.
    """
    q, v = call.q, call.v
    o, den = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=call.dtype)
    state, M = call.initial_state()
    if not call.causal:
        state, M = _absorb(call, state, M)
    for at in call.segments(q.shape[2]):
        queries, M_rows = call.queries(at), None if M is None else finite(M)[:, :, None, None]
        if call.causal:
            keys = call.keys(at)
            weights = call.weights(at, keys, M)
            out, state = _causal_segment(queries, keys, weights, state)
            M, M_rows = weights.M_out, weights.M
        else:
            out = queries.phi.flatten(3, 4) @ state[:, :, None]
        out = (
            out.unflatten(3, (-1, queries.x.shape[4])).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        )  # (b, h, l, e + 1)
        num, den[:, :, at.start : at.stop] = out[..., :-1], out[..., -1]
        o[:, :, at.start : at.stop] = num * _output_factor(call, queries, M_rows, out[..., -1])[..., None]
    M = state.new_zeros(state.shape[:2]) if M is None else M.clone()
    return o, den, state[..., :-1].clone(), state[..., -1].clone(), M


def _output_factor(call: Call, queries: Queries, M_rows: Tensor | None, den: Tensor) -> Tensor:
    """What the numerator is multiplied with, (b, h, l): 1/(den + eps), 0 where den = 0; unnormalised, e^(M + scale)."""
    if call.normalize:
        return 1 / (den + call.eps).masked_fill(den == 0, torch.inf)
    if M_rows is None:
        return torch.ones_like(den)
    log_factor = M_rows[:, :, :, None] + (0.0 if queries.scale is None else queries.scale)  # (b, g, n, r, c)
    log_factor = log_factor.expand(queries.x.shape[:-1])
    return log_factor.transpose(2, 3).flatten(3, 4).flatten(1, 2).exp()


def _absorb(call: Call, state: Tensor, M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The state and M after all keys at once: what non-causal queries read."""
    segments = call.segments(call.k.shape[2])
    if M is not None:
        before = M
        for at in segments:
            M = torch.maximum(M, call.key_weight(at, call.keys(at)).detach().amax((-1, -2)))
        state = state * (before - finite(M)).exp()[..., None, None]
    for at in segments:
        keys = call.keys(at)
        state = state + (_weighted_phi(call, at, keys, M).mT @ keys.v).squeeze(2)
    return state, M


def _weighted_phi(call: Call, at: Segment, keys: Keys, M: Tensor | None) -> Tensor:
    if M is None:
        return keys.phi
    return keys.phi * (call.key_weight(at, keys) - finite(M)[:, :, None, None]).exp()[..., None]


def _causal_segment(queries: Queries, keys: Keys, weights: Weights, state: Tensor) -> tuple[Tensor, Tensor]:
    """o' (b, g, n, r·c, e + 1) and the state behind the segment."""
    before, state = _states(keys, weights, state)
    pairs = _pairs(queries.phi, keys.phi, weights.pair)
    phi_q = queries.phi if weights.query is None else queries.phi * weights.query[:, :, :, None]
    return pairs.flatten(3, 4) @ keys.v + phi_q.flatten(3, 4) @ before, state


def _states(keys: Keys, weights: Weights, state: Tensor) -> tuple[Tensor, Tensor]:
    """S' before each chunk (b, g, n, f, e + 1), and behind the last."""
    phi = keys.phi if weights.key is None else keys.phi * weights.key
    added = phi.mT @ keys.v
    if weights.keep is None:
        total = state[:, :, None] + added.cumsum(2)
        return torch.cat([state[:, :, None], total[:, :, :-1]], dim=2), total[:, :, -1]
    before = []
    for n in range(added.shape[2]):
        before.append(state)
        state = weights.keep[:, :, n, :, None] * state + added[:, :, n]
    return torch.stack(before, dim=2), state


def _pairs(phi_q: Tensor, phi_k: Tensor, pair: Tensor | None) -> Tensor:
    """P (b, g, n, r, c, c): products of features, weighted, 0 for keys of the future (whatever their size)."""
    if pair is not None and pair.shape[-1] > 1:
        return (phi_q[..., :, None, :] * pair[:, :, :, None] * phi_k[:, :, :, None, None]).sum(-1).tril()
    products = (phi_q.flatten(3, 4) @ phi_k.mT).unflatten(3, phi_q.shape[3:5])
    return (products if pair is None else products * pair[:, :, :, None, :, :, 0]).tril()


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    key_log_weight: Tensor | None
    S: Tensor
    z: Tensor
    omega: Tensor | None = None
    bias: Tensor | None = None


def backward(
    call: Call, grad_o: Tensor, grad_S: Tensor | None, grad_z: Tensor | None, o: Tensor, den: Tensor, behind
):
    """The gradients of all inputs; o, den and, where not causal, behind = (S, z, M) as `forward` returned them."""
    state, M = call.initial_state()
    grad_state = torch.zeros_like(state)
    if grad_S is not None:
        grad_state[..., :-1] += grad_S
    if grad_z is not None:
        grad_state[..., -1] += grad_z
    grads = Gradients(
        torch.empty_like(call.q),
        torch.empty_like(call.k),
        torch.empty_like(call.v),
        None if call.log_decay is None else torch.empty_like(call.log_decay),
        None if call.key_log_weight is None else torch.empty_like(call.key_log_weight),
        grad_state[..., :-1],
        grad_state[..., -1],
        *(
            torch.zeros_like(x) if x is not None and call.wants_omega else None
            for x in (call.omega, call.bias)
        ),
    )
    if call.causal:
        grad_state = _causal_backward(call, grads, grad_o, o, den, state, M, grad_state)
    else:
        grad_state = _full_backward(call, grads, grad_o, o, den, M, behind, grad_state)
    return grads._replace(S=grad_state[..., :-1].clone(), z=grad_state[..., -1].clone())


def _causal_backward(call, grads, grad_o, o, den, state, M, grad_state) -> Tensor:
    """A forward sweep that keeps the state before each segment, then one reverse sweep for everything."""
    segments, starts = call.segments(call.q.shape[2]), []
    for i, at in enumerate(segments):
        starts.append((state, M))
        if i + 1 < len(segments):
            keys = call.keys(at)
            weights = call.weights(at, keys, M)
            state, M = _states(keys, weights, state)[1], weights.M_out
    for at, (state, M) in zip(reversed(segments), reversed(starts)):
        queries, keys = call.queries(at), call.keys(at)
        weights = call.weights(at, keys, M)
        G = _grad_output(call, at, queries, weights.M, grad_o, o, den)  # (b, g, n, r·c, e + 1)
        before, behind = _states(keys, weights, state)
        phi_q = queries.phi if weights.query is None else queries.phi * weights.query[:, :, :, None]
        after, grad_state = _reverse_states(phi_q.flatten(3, 4).mT @ G, weights.keep, grad_state)
        grad_phi_q, grad_phi_k = _pairs_backward(G @ keys.v.mT, queries.phi, keys.phi, weights.pair)
        read = (G @ before.mT).unflatten(3, queries.phi.shape[3:5])
        entered = keys.v @ after.mT
        grad_phi_q += read if weights.query is None else read * weights.query[:, :, :, None]
        grad_phi_k += entered if weights.key is None else entered * weights.key
        phi_k = keys.phi if weights.key is None else keys.phi * weights.key
        grad_v = _pairs(queries.phi, keys.phi, weights.pair).flatten(3, 4).mT @ G + phi_k @ after
        _write_queries(call, grads, at, queries, grad_phi_q)
        _write_keys(call, grads, at, keys, grad_phi_k, grad_v)
        if grads.log_decay is not None:
            ends = torch.cat([before[:, :, 1:], behind[:, :, None]], dim=2)  # S' behind each chunk
            flow = (queries.phi * grad_phi_q).sum(3) - keys.phi * grad_phi_k  # (b, g, n, c, f)
            flow[..., -1, :] += (ends * after).sum(-1)
            _write_log_decay(call, grads, at, flow)
    return grad_state


def _full_backward(call, grads, grad_o, o, den, M_before, behind, grad_state) -> Tensor:
    """Non-causal: the queries' gradient of the one state, then the keys' share of it."""
    S, z, M = behind
    state, M = torch.cat([S, z[..., None]], dim=-1), M if call.weighted else None
    M_rows = None if M is None else finite(M)[:, :, None, None]
    for at in call.segments(call.q.shape[2]):
        queries = call.queries(at)
        G = _grad_output(call, at, queries, M_rows, grad_o, o, den)
        grad_state = grad_state + (queries.phi.flatten(3, 4).mT @ G).squeeze(2)
        _write_queries(
            call, grads, at, queries, (G @ state[:, :, None].mT).unflatten(3, queries.phi.shape[3:5])
        )
    for at in call.segments(call.k.shape[2]):
        keys = call.keys(at)
        phi = _weighted_phi(call, at, keys, M)
        entered = keys.v @ grad_state[:, :, None].mT
        if M is not None:
            entered = entered * (call.key_weight(at, keys) - finite(M)[:, :, None, None]).exp()[..., None]
        _write_keys(call, grads, at, keys, entered, phi @ grad_state[:, :, None])
    return grad_state if M is None else grad_state * (M_before - finite(M)).exp()[..., None, None]


def _grad_output(call, at, queries, M_rows, grad_o, o, den) -> Tensor:
    """G' (b, g, n, r·c, e + 1): the gradient of [numerator | denominator], from that of o."""
    here = slice(at.start, at.stop)
    g, den = grad_o[:, :, here].to(call.dtype), den[:, :, here]
    factor = _output_factor(call, queries, M_rows, den)
    grad_den = -factor * (g * o[:, :, here]).sum(-1) if call.normalize else torch.zeros_like(den)
    G = torch.cat([g * factor[..., None], grad_den[..., None]], dim=-1)  # (b, h, l, e + 1)
    r, c = queries.x.shape[3:5]
    return G.unflatten(1, (-1, r)).unflatten(3, (at.n, c)).transpose(2, 3).flatten(3, 4)


def _reverse_states(added: Tensor, keep: Tensor | None, grad_state: Tensor) -> tuple[Tensor, Tensor]:
    """R' behind each chunk (b, g, n, f, e + 1), and before the first."""
    after = []
    for n in reversed(range(added.shape[2])):
        after.append(grad_state)
        grad_state = (grad_state if keep is None else keep[:, :, n, :, None] * grad_state) + added[:, :, n]
    return torch.stack(after[::-1], dim=2), grad_state


def _pairs_backward(grad: Tensor, phi_q: Tensor, phi_k: Tensor, pair: Tensor | None) -> tuple[Tensor, Tensor]:
    """dφ(Q) (b, g, n, r, c, f) and dφ(K) (b, g, n, c, f) from the gradient of P (b, g, n, r·c, c)."""
    shape = phi_q.shape[3:5]
    grad = grad.unflatten(3, shape).tril()
    if pair is not None and pair.shape[-1] > 1:
        weighted = grad[..., None] * pair[:, :, :, None]  # (b, g, n, r, c, c, f)
        return (
            (weighted * phi_k[:, :, :, None, None]).sum(-2),
            (weighted * phi_q[..., :, None, :]).sum((3, 4)),
        )
    if pair is not None:
        grad = (grad * pair[:, :, :, None, :, :, 0]).tril()
    grad = grad.flatten(3, 4)
    return (grad @ phi_k).unflatten(3, shape), grad.mT @ phi_q.flatten(3, 4)


def _inputs_backward(call, grads, x: Tensor, phi: Tensor, grad_phi: Tensor) -> Tensor:
    """∂/∂x from ∂/∂features; of a projection, those of Ω and β are added to."""
    if call.omega is None:
        return features_backward(call.feature_map, x, phi, grad_phi)
    phi = phi - call.shift
    grad_u = features_backward(call.feature_map, phi, phi, grad_phi)  # φ > 0 where u > 0: φ serves for u
    if grads.omega is not None:
        products = grad_u.flatten(2, -2).mT @ x.flatten(2, -2)  # (b, g, f, d)
        grads.omega.add_(call.factor * products.sum_to_size(grads.omega.shape))
    if grads.bias is not None:
        grads.bias.add_(grad_u.flatten(2, -2).sum(2).sum_to_size(grads.bias.shape))
    grad = call.factor * (grad_u @ call._spread_over(call.omega, x))
    return grad - 2 * call.square * grad_u.sum(-1, keepdim=True) * x if call.square else grad


def _write_queries(call, grads, at, queries, grad_phi) -> None:
    grad = _inputs_backward(call, grads, queries.x, queries.phi, grad_phi)
    grads.q[:, :, at.start : at.stop] = grad.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _write_keys(call, grads, at, keys, grad_phi, grad_v) -> None:
    here = slice(at.start, at.stop)
    if grads.key_log_weight is not None:
        grads.key_log_weight[:, :, here] = (keys.phi * grad_phi).sum(-1).flatten(2, 3)
    x = keys.x
    if (
        call.omega is not None and call.key_mask is not None
    ):  # whatever stands at masked keys meets zeros, and stays out
        x = x.masked_fill(~call._mask(at)[..., None], 0.0)
    grad = _inputs_backward(call, grads, x, keys.phi, grad_phi).flatten(2, 3)
    grad_v = grad_v[..., :-1].flatten(2, 3)
    if call.key_mask is not None:
        masked = ~call.key_mask[:, None, here, None]
        grad, grad_v = grad.masked_fill(masked, 0.0), grad_v.masked_fill(masked, 0.0)
    grads.k[:, :, here], grads.v[:, :, here] = grad, grad_v


def _write_log_decay(call, grads, at, flow) -> None:
    """dlog_decay_l = Σ_{i ≥ l} flow_i within the chunk: each i that reads across l, less each j > l that does not."""
    grad = flow.flip(-2).cumsum(-2).flip(-2).flatten(2, 3)  # (b, g, l, f)
    if call.key_mask is not None:
        grad = grad.masked_fill(~call.key_mask[:, None, at.start : at.stop, None], 0.0)
    grads.log_decay[:, :, at.start : at.stop] = grad if grads.log_decay.ndim == 4 else grad.sum(-1)
