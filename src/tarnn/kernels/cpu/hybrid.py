"""Hybrid attention by the compiled kernels (csrc/hybrid): forward, backward, and one token in place."""

from typing import Any

import torch

from tarnn.kernels.contract import present
from tarnn.kernels.cpu import arguments, library
from tarnn.kernels.hybrid import Call, Gradients, Outputs, Token
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import wide


def refusal(call: Call | Token) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    q = call.q
    if not is_untraced(q):
        return "A traced call is computed in plain PyTorch."
    if not q.is_cpu or not arguments.takes(q.dtype):
        return (
            "The compiled kernels of hybrid attention take float32, bfloat16 and float16 on CPUs; "
            f"got {q.dtype} on {q.device}."
        )
    stored = (call.store_k, call.store_v) if isinstance(call, Token) else (call.k, call.v)
    if any(wide(x.dtype) != wide(q.dtype) for x in (*stored, call.S)):
        return "The compiled kernels of hybrid attention take no float64 beside other types."
    if call.slot_score is not None:
        return "Slots are filled in plain PyTorch."
    if isinstance(call, Token):
        if not all(x.is_contiguous() for x in (call.fade, call.S, call.z, call.M)):
            return "The compiled step writes into states without gaps; this one is a view of another."
        return library.refusal()
    if call.clock is not None:
        return "Keys fade in plain PyTorch; only single tokens do so in the compiled kernels."
    watched = torch.is_grad_enabled() and any(x.requires_grad for x in present(call))
    if watched and not call.gradients_of_o_alone:
        return "Gradients through a state or ρ are computed in plain PyTorch."
    return library.refusal()


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    """Zeros at what is no token."""
    q, kind, e = call.q, wide(call.q.dtype), call.v.shape[3]
    o = q.new_zeros(*q.shape[:3], e, dtype=call.v.dtype)
    share = q.new_zeros(q.shape[:3], dtype=kind)
    log_total = torch.full_like(share, torch.inf) if for_backward else None
    before = [x.contiguous() for x in (call.S, call.z, call.M)]
    after = [torch.empty_like(x) for x in before]
    behind = joined = None
    if call.phi_q is None:
        after = before
    elif not call.causal:
        behind = q.new_empty(*q.shape[:3], e + 2, dtype=kind)
        joined = behind.new_zeros(*q.shape[:3], 2) if for_backward else None
    inputs = _inputs(call)
    torch.ops.tarnn_cpu.hybrid_forward.default(*inputs, *before, o, share, log_total, behind, joined, *after)
    S, z, M = after
    return Outputs(o, share, S, z, M, log_total=log_total, joined=joined)


def backward(call: Call, returned: Any) -> Gradients:
    """Compute the gradients of a call without sums before it. Those of log-scales are φ·dφ, summed."""
    kind = wide(call.q.dtype)
    a_behind = None
    if call.a is not None:  # a far part that is nothing has no gradient
        parts = [returned.share] if returned.joined is None else returned.joined.unbind(-1)
        before, *behind = [call.a.masked_fill(part == 0, -torch.inf) for part in parts]
        call, a_behind = call._replace(a=before), behind[0] if behind else None
    grad_q = torch.zeros_like(call.q)
    keys = [x.new_zeros(x.shape, dtype=kind) for x in call[1:5]]
    phi_q, phi_k = (None if x is None else x.new_zeros(x.shape, dtype=kind) for x in (call.phi_q, call.phi_k))
    kept = (returned.o, returned.log_total, returned.grad_o)
    torch.ops.tarnn_cpu.hybrid_backward.default(*_inputs(call), a_behind, *kept, grad_q, *keys, phi_q, phi_k)
    a, weight = (
        None if grad is None or phi is None else (grad if call.log_features else phi * grad).sum(-1)
        for phi, grad in ((call.phi_q, phi_q), (call.phi_k, phi_k))
    )
    keys = [grad.to(x.dtype) for grad, x in zip(keys, call[1:5])]
    return Gradients._make((grad_q, *keys, phi_q, a, phi_k, weight))


def _inputs(call: Call) -> tuple:
    """The call in the order of the kernels' arguments."""
    constants = (call.window, call.causal, call.scale, call.softcap, call.log_features)
    far = (call.phi_q, call.a, call.phi_k, call.weight)
    barred = num_sinks = None  # of keys among the sinks that are not the first ones: no op has such
    return (*call[:5], call.seen, call.length, *far, barred, num_sinks, *constants)


def step(token: Token) -> Outputs:
    """o (b, h, 1, e) and ρ (b, h, 1). The token is written into the state in place."""
    q, v = token.q, token.v.to(token.store_v.dtype)
    o = v.new_empty(*q.shape[:3], v.shape[3])
    share = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    inputs = (q, token.k.to(token.store_k.dtype), v, token.phi_q, token.a, token.phi_k, token.weight, token.decay)
    state = (token.store_k, token.store_v, token.fade, token.seen, token.S, token.z, token.M)
    torch.ops.tarnn_cpu.hybrid_step.default(*inputs, *state, o, share, token.sinks, token.scale, token.softcap)
    token.seen.add_(1)
    return Outputs(o.to(token.v.dtype), share, token.S, token.z, token.M)
