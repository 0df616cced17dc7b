"""Hybrid attention by the compiled kernels (csrc/hybrid): forward, backward, and one token in place."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.linear import DTYPES
from tarnn.kernels.plain import is_plain
from tarnn.numerics import wide


class HybridCall(NamedTuple):
    """Queries, and keys and values in a row: those of the window before, then the new ones. Features are None together.

    seen, length (b,): how many tokens each row had before, and has now; what stands behind them is not read.
    """

    q: Tensor  # (b, h, t, d)
    k: Tensor  # (b, g, w + t, d)
    v: Tensor  # (b, g, w + t, e)
    sink_k: Tensor  # (b, g, s, d)
    sink_v: Tensor  # (b, g, s, e)
    seen: Tensor
    length: Tensor
    phi_q: Any  # (b, h, t, f) wide, as are all below; with log_features log φ
    a: Any  # (b, h, t)  log-scales of queries, with λ
    phi_k: Any  # (b, g, t, f)  causal: of the keys that leave the window at each new token; else of the new keys
    weight: Any  # (b, g, t)  their log-scales, −∞ for those that never enter the sums
    window: int
    causal: bool
    scale: float
    softcap: float  # 0: none
    log_features: bool  # features are logarithms, and their sums have an M (b, g, f)


class Sums(NamedTuple):
    S: Tensor
    z: Tensor
    M: Tensor


class HybridOutputs(NamedTuple):
    """o (b, h, t, e); ρ (b, h, t); ℓ (b, h, t), the log of each query's denominator, for backward; the sums behind."""

    o: Tensor
    share: Tensor
    log_total: Tensor | None
    sums: Sums


def refusal(q: Tensor) -> str | None:
    """Why the compiled kernels can't compute attention of such queries, or None."""
    if not is_plain(q):
        return "A traced call is computed in plain PyTorch."
    if not q.is_cpu or q.dtype not in DTYPES:
        return (
            f"The compiled kernels of hybrid attention are for floating numbers on CPUs; got {q.dtype} on {q.device}."
        )
    return library.refusal()


def forward(call: HybridCall, sums: Sums, *, for_backward: bool) -> HybridOutputs:
    """Zeros at what is no token."""
    q, kind, e = call.q, wide(call.q.dtype), call.v.shape[3]
    o = q.new_zeros(*q.shape[:3], e, dtype=call.v.dtype)
    share = q.new_zeros(q.shape[:3], dtype=kind)
    log_total = torch.full_like(share, torch.inf) if for_backward else None
    before = Sums(*(x.contiguous() for x in sums))
    after = Sums(*(torch.empty_like(x) for x in before))
    behind = None
    if call.phi_q is None:
        after = before
    elif not call.causal:
        behind = q.new_empty(*q.shape[:3], e + 2, dtype=kind)
    torch.ops.tarnn_cpu.hybrid_forward.default(*call, *before, o, share, log_total, behind, *after)
    return HybridOutputs(o, share, log_total, after)


def backward(call: HybridCall, o: Tensor, log_total: Tensor, grad_o: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, sink_k, sink_v, phi_q and phi_k (of the logarithms, where these are), of a causal call
    that no sums came before."""
    kind = wide(call.q.dtype)
    grad_q = torch.zeros_like(call.q)
    keys = [x.new_zeros(x.shape, dtype=kind) for x in call[1:5]]
    far = [None if x is None else x.new_zeros(x.shape, dtype=kind) for x in (call.phi_q, call.phi_k)]
    torch.ops.tarnn_cpu.hybrid_backward.default(*call, o, log_total, grad_o, grad_q, *keys, *far)
    return (grad_q, *(grad.to(x.dtype) for grad, x in zip(keys, call[1:5])), *far)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: tuple[Any, ...],
    decay: Tensor | None,
    store: tuple[Tensor, Tensor, Tensor],
    count: Tensor,
    sums: Sums,
    *,
    sinks: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """o (b, h, 1, e) and ρ (b, h, 1) of one token per row. Written in place: the store (keys, values, fade), and the sums.

    far: φ(q) and its log-scale with λ, then φ and log-scale (b, g, 1) of the key in the room that the token takes; Nones
    without features.
    """
    o = v.new_empty(*q.shape[:3], v.shape[3])
    share = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    torch.ops.tarnn_cpu.hybrid_step.default(q, k, v, *far, decay, *store, count, *sums, o, share, sinks, scale, softcap)
    return o, share
