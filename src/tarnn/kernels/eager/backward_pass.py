"""Backward: for the queries a forward sweep, or their share of the one state; for keys and values one reverse sweep."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.eager.forward_pass import one_in_units, output_factor, pair_products, states, weighted_phi
from tarnn.kernels.eager.segments import Keys, Queries, Segment, Segments, spread_over
from tarnn.kernels.features import features_backward
from tarnn.kernels.linear import BackwardInputs, Call, Gradients
from tarnn.numerics import finite


def backward(call: Call, returned: BackwardInputs) -> Gradients:
    """The gradients of a call that isn't packed."""
    segments, grads = Segments(call), call.new_gradients(returned)
    state, M = segments.initial_state()
    grad_state = torch.zeros_like(state)
    if returned.grad_S is not None:
        grad_state[..., :-1] += returned.grad_S
    if returned.grad_z is not None:
        grad_state[..., -1] += returned.grad_z
    if call.causal:
        grad_state = _causal_backward(segments, grads, returned, state, M, grad_state)
    else:
        grad_state = _full_backward(segments, grads, returned, M, grad_state)
    if call.S is not None:
        grads.S.copy_(grad_state[..., :-1])
        grads.z.copy_(grad_state[..., -1])
    return grads.of(call)


def _causal_backward(segments: Segments, grads, returned, state, M, grad_state) -> Tensor:
    """A forward sweep that keeps the state before each segment, then one reverse sweep for everything."""
    parts, starts = segments.of(segments.call.q.shape[2]), []
    for i, at in enumerate(parts):
        starts.append((state, M))
        if i + 1 < len(parts):
            keys = segments.keys(at)
            weights = segments.weights(at, keys, M)
            state, M = states(keys, weights, state)[1], weights.M_out
    for at, (state, M) in zip(reversed(parts), reversed(starts)):
        grad_state = _causal_segment_backward(segments, grads, returned, at, state, M, grad_state)
    return grad_state


def _causal_segment_backward(segments: Segments, grads, returned, at, state, M, grad_state) -> Tensor:
    """Writes a segment's gradients; the gradient of the state before it, from that of the one after it."""
    queries, keys = segments.queries(at), segments.keys(at)
    weights = segments.weights(at, keys, M)
    G = _grad_output(segments.call, at, queries, weights.M, returned)  # (b, g, n, r·c, e + 1)
    before, _ = states(keys, weights, state)
    phi_q = queries.phi if weights.query is None else queries.phi * weights.query[:, :, :, None]
    after, grad_state = _reverse_states(phi_q.flatten(3, 4).mT @ G, weights.keep, grad_state)
    P = pair_products(queries.phi, keys.phi, weights.pair)
    A = (G @ keys.v.mT).unflatten(3, queries.phi.shape[3:5]).tril()
    read = (G @ before.mT).unflatten(3, queries.phi.shape[3:5])
    read = read if weights.query is None else read * weights.query[:, :, :, None]
    entered = keys.v @ after.mT
    entered = entered if weights.key is None else entered * weights.key
    grad_phi_q, grad_phi_k = _pairs_backward(A, queries.phi, keys.phi, weights.pair)
    phi_k = keys.phi if weights.key is None else keys.phi * weights.key
    _write_queries(segments.call, grads, at, queries, grad_phi_q + read)
    _write_keys(segments, grads, at, keys, grad_phi_k + entered, P.flatten(3, 4).mT @ G + phi_k @ after)
    if grads.log_decay is not None:
        flow = _flow(A, P, queries.phi, keys.phi, weights.pair)
        keep: Any = weights.keep
        across = (before * after).sum(-1) * keep
        _write_log_decay(segments, grads, at, flow, (queries.phi * read).sum(3), keys.phi * entered, across)
    return grad_state


def _full_backward(segments: Segments, grads, returned, M_before, grad_state) -> Tensor:
    """Non-causal: the queries' gradient of the one state, then the keys' share of it."""
    call = segments.call
    state = torch.cat([returned.S_behind, returned.z_behind[..., None]], dim=-1)
    M = returned.M_behind if call.weighted else None
    M_rows = None if M is None else finite(M)[:, :, None, None]
    for at in segments.of(call.q.shape[2]):
        queries = segments.queries(at)
        G = _grad_output(call, at, queries, M_rows, returned)
        grad_state = grad_state + (queries.phi.flatten(3, 4).mT @ G).squeeze(2)
        grad_phi = (G @ state[:, :, None].mT).unflatten(3, queries.phi.shape[3:5])
        _write_queries(call, grads, at, queries, grad_phi)
    for at in segments.of(call.k.shape[2]):
        keys = segments.keys(at)
        phi = weighted_phi(segments, at, keys, M)
        entered = keys.v @ grad_state[:, :, None].mT
        if M is not None:
            entered = entered * (segments.key_weight(at, keys) - finite(M)[:, :, None, None]).exp()[..., None]
        _write_keys(segments, grads, at, keys, entered, phi @ grad_state[:, :, None])
    return grad_state if M is None else grad_state * (M_before - finite(M)).exp()[..., None, None]


def _grad_output(call: Call, at: Segment, queries: Queries, M_rows: Tensor | None, returned: BackwardInputs) -> Tensor:
    """G' (b, g, n, r·c, e + 1): the gradient of [numerator | denominator], from that of o."""
    here = slice(at.start, at.stop)
    grad, den = returned.grad_o[:, :, here].to(call.dtype), returned.den[:, :, here]
    factor = output_factor(call, queries, M_rows, den)
    through = (grad * returned.o[:, :, here]).sum(-1) if call.normalize else torch.zeros_like(den)
    if call.at_least_one:
        through = through * den.sign().masked_fill(den.abs() <= one_in_units(call, queries, M_rows, den), 0.0)
    G = torch.cat([grad * factor[..., None], (-factor * through)[..., None]], dim=-1)  # (b, h, l, e + 1)
    g, _, r, c = queries.x.shape[1:5]
    return G.unflatten(1, (g, r)).unflatten(3, (at.n, c)).transpose(2, 3).flatten(3, 4)


def _reverse_states(added: Tensor, keep: Tensor | None, grad_state: Tensor) -> tuple[Tensor, Tensor]:
    """R' after each chunk (b, g, n, f, e + 1), and before the first."""
    after = []
    for n in reversed(range(added.shape[2])):
        after.append(grad_state)
        grad_state = (grad_state if keep is None else keep[:, :, n, :, None] * grad_state) + added[:, :, n]
    return torch.stack(after[::-1], dim=2), grad_state


def _pairs_backward(A: Tensor, phi_q: Tensor, phi_k: Tensor, pair: Tensor | None) -> tuple[Tensor, Tensor]:
    """dφ(Q) (b, g, n, r, c, f) and dφ(K) (b, g, n, c, f) from A (b, g, n, r, c, c), the gradient of P."""
    if pair is not None and pair.shape[-1] > 1:
        weighted = A[..., None] * pair[:, :, :, None]  # (b, g, n, r, c, c, f)
        grad_q = (weighted * phi_k[:, :, :, None, None]).sum(-2)
        return grad_q, (weighted * phi_q[..., :, None, :]).sum((3, 4))
    if pair is not None:
        A = A * pair[:, :, :, None, :, :, 0]
    flat = A.flatten(3, 4)
    return (flat @ phi_k).unflatten(3, A.shape[3:5]), flat.mT @ phi_q.flatten(3, 4)


def _flow(A: Tensor, P: Tensor, phi_q: Tensor, phi_k: Tensor, pair: Any) -> Tensor:
    """Compute A_ij P_ij for j < i, which flows from key j to query i: (b, g, n, x, c, c), x = f if decays have channels."""
    if pair.shape[-1] == 1:
        return (A * P).sum(3)[:, :, :, None].tril(-1)
    # (b, g, n, c, c, f)
    channels = (A[..., None] * phi_q[..., :, None, :]).sum(3) * pair * phi_k[:, :, :, None]
    return channels.movedim(-1, 3).tril(-1)


def _inputs_backward(call: Call, grads: Gradients, x: Tensor, phi: Tensor, grad_phi: Tensor) -> Tensor:
    """∂/∂x from ∂/∂features; of a projection, those of Ω and β are added to."""
    if call.omega is None:
        return features_backward(call.function, x, phi, grad_phi)
    phi = phi - call.shift
    grad_u = features_backward(call.function, phi, phi, grad_phi)  # φ > 0 where u > 0: φ will do for u
    if grads.omega is not None:
        products = grad_u.flatten(2, -2).mT @ x.flatten(2, -2)  # (b, g, f, d)
        grads.omega.add_(call.factor * products.sum_to_size(grads.omega.shape))
    if grads.bias is not None:
        grads.bias.add_(grad_u.flatten(2, -2).sum(2).sum_to_size(grads.bias.shape))
    grad = call.factor * (grad_u @ spread_over(call.omega, x))
    return grad - 2 * call.square * grad_u.sum(-1, keepdim=True) * x if call.square else grad


def _write_queries(call: Call, grads: Gradients, at: Segment, queries: Queries, grad_phi: Tensor) -> None:
    grad = _inputs_backward(call, grads, queries.x, queries.phi, grad_phi)
    grad = grad.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    grads.q[:, :, at.start : at.stop] = _of_groups(grad, call)


def _write_keys(segments: Segments, grads: Gradients, at: Segment, keys: Keys, grad_phi, grad_v) -> None:
    here = slice(at.start, at.stop)
    if segments.masked is not None:
        grad_phi = grad_phi.masked_fill(segments.masked[:, :, here].unflatten(2, (at.n, at.c))[..., None], 0.0)
    if grads.key_log_weight is not None:
        grads.key_log_weight[:, :, here] = (keys.phi * grad_phi).sum(-1).flatten(2, 3)
    grad = _inputs_backward(segments.call, grads, keys.x, keys.phi, grad_phi).flatten(2, 3)
    grad_v = grad_v[..., :-1].flatten(2, 3)
    if segments.masked is not None:
        grad_v = grad_v.masked_fill(segments.masked[:, :, here, None], 0.0)
    grads.k[:, :, here], grads.v[:, :, here] = _of_groups(grad, segments.call), grad_v


def _of_groups(grad: Tensor, call: Call) -> Tensor:
    """The gradient of queries or keys, (b, m, l, d), summed over the heads of values that share them."""
    return grad.unflatten(1, (-1, call.values_per_key)).sum(2) if call.values_per_key > 1 else grad


def _write_log_decay(segments: Segments, grads: Gradients, at: Segment, flow, read, entered, across) -> None:
    """dlog_decay_l = Σ_{j<l≤i} flow_ij + Σ_{i≥l} read_i + Σ_{j<l} entered_j + across, within each chunk.

    That is all that passes l: from keys before it to queries from it on, from the state before the chunk to those
    queries, from those keys to the state after the chunk, and from state to state. Sums only: a difference of larger
    ones would lose digits. flow (b, g, n, x, c, c); read and entered (b, g, n, c, f); across (b, g, n, f).
    """
    if not segments.call.has_channels:
        read, entered, across = (x.sum(-1, keepdim=True) for x in (read, entered, across))
    passing = pad(flow.cumsum(-1)[..., :-1], (1, 0)).tril().sum(-2).mT  # (b, g, n, c, x)
    to_later = read.flip(-2).cumsum(-2).flip(-2)
    from_earlier = pad(entered.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
    grad = (passing + to_later + from_earlier + across[..., None, :]).flatten(2, 3)  # (b, g, l, x)
    if segments.masked is not None:
        grad = grad.masked_fill(segments.masked[:, :, at.start : at.stop, None], 0.0)
    grads.log_decay[:, :, at.start : at.stop] = grad if segments.call.has_channels else grad.squeeze(-1)
