"""Linear attention in plain PyTorch, any device: the backend that is always there.

Time is cut into segments, a segment into n chunks of c positions. Within a chunk the (c × c) products of
queries and keys are masked; across chunks the state S' = [S | z] runs on, v' = [v | 1]:

    P  = (φ(Q) φ(K)ᵀ) ⊙ pair                   o' = P v' + (query ⊙ φ(Q)) S'_in      o = o'[:e] / (o'[e] + eps)
    S'_out = keep · S'_in + (key ⊙ φ(K))ᵀ v'

and, with G' the gradient of o' and R' that of S'_out (eq. 13–15 of Katharopoulos et al. 2020, by chunks),

    dφ(Q) = (G'v'ᵀ ⊙ pair) φ(K) + query ⊙ G'S'_inᵀ        R'_in = keep · R' + (query ⊙ φ(Q))ᵀ G'
    dφ(K) = (G'v'ᵀ ⊙ pair)ᵀ φ(Q) + key ⊙ v'R'ᵀ            dv' = PᵀG' + (key ⊙ φ(K)) R'

The factors pair, query, key and keep (`segments.py`) are 1 for a plain sum. Features and sums are float32
(float64 for float64 inputs). Kept for backward: q, k, v, o and the denominator, one number per query. Features
are computed again; beside the results lives one segment's worth of temporaries, and one state a segment.

`forward` and `step` are made of differentiable operations, so the second derivative is autograd through `forward`.
"""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.eager import backward_pass, forward_pass, packed, refusal as refusal
from tarnn.kernels.eager.segments import call_features
from tarnn.kernels.linear import BackwardInputs, Call, Gradients, Outputs
from tarnn.numerics import finite, full_precision


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.forward(forward_pass.forward, call, cuts, call.in_time, call.per_sequence)
        return forward_pass.forward(call)


def backward(call: Call, returned: BackwardInputs) -> Gradients:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            whole = backward_pass.backward
            return packed.backward(whole, call, returned, cuts, call.in_time, call.per_sequence).of(call)
        return backward_pass.backward(call, returned)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    with full_precision(call.q):
        return _one_token(call, inplace)


# --- one token, in operations that autograd, torch.compile, torch.export and torch.func see through


def _one_token(call: Call, inplace: bool) -> Outputs:
    """S ← e^log_decay S + e^w φ(k) vᵀ and z likewise, in units of e^M; o = φ(q)ᵀS / (φ(q)ᵀz + eps)."""
    q, k = (call.for_values(x).to(call.dtype) for x in (call.q, call.k))
    groups = (call.v.shape[1], call.num_heads // call.v.shape[1])
    phi_q, scale = call_features(call, q.unflatten(1, groups))  # (b, m, r, 1, f)
    phi_k, weight = call_features(call, k)  # (b, m, 1, f)
    if call.key_log_weight is not None:
        given = call.key_log_weight.to(call.dtype)
        weight = given if weight is None else weight + given
    keep, phi_k, M = _decay_and_weight(call, phi_k.squeeze(2), weight)
    S, z, M = _update(call, keep, phi_k, M, inplace)
    phi_q = phi_q.squeeze(3)
    num, den = phi_q @ S, phi_q @ z[..., None]  # (b, g, r, e), (b, g, r, 1)
    if call.at_least_one:
        size, one = den.abs(), torch.ones_like(den)
        if M is not None:
            units = finite(M)[:, :, None, None] + (0.0 if scale is None else scale)
            one = (-units).exp().clamp(min=torch.finfo(den.dtype).tiny).expand_as(den)
        num = num / torch.where(size > one, size, one)
    elif call.normalize:
        num = num / (den + call.eps).masked_fill(den == 0, torch.inf)
    elif M is not None:
        units = finite(M)[:, :, None, None]
        units = units if scale is None else (units + scale).masked_fill(den == 0, -torch.inf)
        num = num * units.exp()
    return Outputs(num.flatten(1, 2)[:, :, None].to(call.v.dtype), None, S, z, M)


def _decay_and_weight(call: Call, phi_k: Tensor, w: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(what the state is multiplied with (…, f or 1) or None, φ(k) weighted, new M or None)."""
    decay = call.log_decay  # (b, g, 1) or (b, g, 1, f)
    decay = None if decay is None else decay.to(call.dtype).reshape(*phi_k.shape[:2], decay.shape[-1])
    if not call.weighted:
        return None if decay is None else decay.exp(), phi_k, None
    before = phi_k.new_zeros(phi_k.shape[:2]) if call.M is None else call.M
    w = torch.zeros_like(before) if w is None else w.squeeze(2)
    grown = before if decay is None else before + decay.amax(-1)
    M = torch.maximum(grown, w).detach()
    keep = before[..., None] - finite(M)[..., None]
    return (keep if decay is None else keep + decay).exp(), phi_k * (w - finite(M)).exp()[..., None], M


def _update(call: Call, keep, phi_k, M, inplace: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """S, z and M after the token; in place, those of the call, written to."""
    S: Any
    z: Any
    M_before: Any
    S, z, M_before, value = call.S, call.z, call.M, call.v.to(call.dtype).squeeze(2)
    if not inplace:
        S, z = (S, z) if keep is None else (S * keep[..., None], z * keep)
        return torch.addcmul(S, phi_k[..., None], value[:, :, None]), z + phi_k, M
    if keep is not None:
        S.mul_(keep[..., None])
        z.mul_(keep)
    S.addcmul_(phi_k[..., None], value[:, :, None])
    z.add_(phi_k)
    return S, z, None if M is None else M_before.copy_(M)
