"""Forward, chunk by chunk, in operations that autograd and torch.func see through."""

import torch
from torch import Tensor

from tarnn.kernels.eager.packed import in_time
from tarnn.kernels.eager.segments import Keys, Queries, Segment, Segments, Weights
from tarnn.kernels.linear import Call, Outputs
from tarnn.kernels.tracing import known_finite
from tarnn.numerics import finite, marked, set_aside


def forward(call: Call) -> Outputs:
    """The outputs of a call that isn't packed."""
    q, segments = call.q, Segments(call)
    outs, dens = (
        [call.v.new_empty(len(q), call.num_heads, 0, call.v.shape[3])],
        [q.new_empty(len(q), call.num_heads, 0, dtype=call.dtype)],
    )
    state, M = segments.initial_state()
    if not call.causal:
        state, M = _absorb(segments, state, M)
    for at in segments.of(q.shape[2]):
        queries, M_rows = segments.queries(at), None if M is None else finite(M)[:, :, None, None]
        if call.causal:
            keys = segments.keys(at)
            weights = segments.weights(at, keys, M)
            out, state = _causal_segment(queries, keys, weights, state)
            M, M_rows = weights.M_out, weights.M
        else:
            out = queries.phi.flatten(3, 4) @ state[:, :, None]
        out = out.unflatten(3, queries.x.shape[3:5]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        num, den = out[..., :-1], out[..., -1]  # (b, h, l, e), (b, h, l)
        outs.append((num * output_factor(call, queries, M_rows, den)[..., None]).to(call.v.dtype))
        dens.append(den)
    M = state.new_zeros(state.shape[:2]) if M is None else M
    in_a_row = torch.contiguous_format
    S, z, M = (x.clone(memory_format=in_a_row) for x in (state[..., :-1], state[..., -1], M))
    return Outputs(in_time(call, outs), torch.cat(dens, 2), S, z, M)


def output_factor(call: Call, queries: Queries, M_rows: Tensor | None, den: Tensor) -> Tensor:
    """Return the factor of the numerator, (b, h, l): 1/(den + eps), 0 where den = 0; 1/max(|den|, 1), in true units;
    unnormalised, e^(M + scale), 0 where features with a scale meet no key."""
    if call.at_least_one:
        size, one = den.abs(), one_in_units(call, queries, M_rows, den)
        return 1 / torch.where(size > one, size, one)
    if call.normalize:
        return 1 / (den + call.eps).masked_fill(den == 0, torch.inf)
    if M_rows is None:
        return torch.ones_like(den)
    units = _log_units(queries, M_rows)
    return units.exp() if queries.scale is None else units.masked_fill(den == 0, -torch.inf).exp()


def one_in_units(call: Call, queries: Queries, M_rows: Tensor | None, den: Tensor) -> Tensor:
    """1 in the units of each query's sums, (b, h, l); never 0."""
    if M_rows is None:
        return torch.ones_like(den)
    return (-_log_units(queries, M_rows)).exp().clamp(min=torch.finfo(den.dtype).tiny)


def _log_units(queries: Queries, M_rows: Tensor) -> Tensor:
    """M + scale, (b, h, l): the logarithm of what sums have to be multiplied with, to be true."""
    units = M_rows[:, :, :, None] + (0.0 if queries.scale is None else queries.scale)  # (b, g, n, r, c)
    return units.expand(queries.x.shape[:-1]).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _absorb(segments: Segments, state: Tensor, M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The state and M after all keys at once: what non-causal queries read."""
    all_keys = segments.of(segments.call.k.shape[2])
    if M is not None:
        before = M
        for at in all_keys:
            M = torch.maximum(M, segments.key_weight(at, segments.keys(at)).detach().amax((-1, -2)))
        state = state * (before - finite(M)).exp()[..., None, None]
    for at in all_keys:
        keys = segments.keys(at)
        state = state + (weighted_phi(segments, at, keys, M).mT @ keys.v).squeeze(2)
    return state, M


def weighted_phi(segments: Segments, at: Segment, keys: Keys, M: Tensor | None) -> Tensor:
    if M is None:
        return keys.phi
    return keys.phi * (segments.key_weight(at, keys) - finite(M)[:, :, None, None]).exp()[..., None]


def _causal_segment(queries: Queries, keys: Keys, weights: Weights, state: Tensor) -> tuple[Tensor, Tensor]:
    """o' (b, g, n, r·c, e + 1) and the state after the segment."""
    before, state = states(keys, weights, state)
    products = pair_products(queries.phi, keys.phi, weights.pair)
    phi_q = queries.phi if weights.query is None else queries.phi * weights.query[:, :, :, None]
    value, later = keys.v, None
    if not known_finite(value):
        value, spoilt = set_aside(value)
        later = spoilt.cumsum(-1)[:, :, :, None] > 0  # (b, g, n, 1, c)
        later = later.expand(products.shape[:-1]).flatten(3, 4)
    return marked(products.flatten(3, 4) @ value + phi_q.flatten(3, 4) @ before, later), state


def states(keys: Keys, weights: Weights, state: Tensor) -> tuple[Tensor, Tensor]:
    """S' before each chunk (b, g, n, f, e + 1), and after the last."""
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


def pair_products(phi_q: Tensor, phi_k: Tensor, pair: Tensor | None) -> Tensor:
    """P (b, g, n, r, c, c): products of features, weighted, 0 for keys of the future (whatever their size)."""
    if pair is not None and pair.shape[-1] > 1:
        return (phi_q[..., :, None, :] * pair[:, :, :, None] * phi_k[:, :, :, None, None]).sum(-1).tril()
    products = (phi_q.flatten(3, 4) @ phi_k.mT).unflatten(3, phi_q.shape[3:5])
    return (products if pair is None else products * pair[:, :, :, None, :, :, 0]).tril()
