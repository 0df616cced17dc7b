"""Hybrid attention by the compiled kernel (csrc/attention/hybrid.h): causal, forward, window and sinks and features."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.cpu import DTYPES, library
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
    phi_q: Any  # (b, h, t, f) wide, as are all below
    a: Any  # (b, h, t)  log-scales of queries, with λ
    phi_k: Any  # (b, g, t, f)  of the keys that leave the window at each new token
    weight: Any  # (b, g, t)  their log-scales, −∞ where none does
    S: Tensor
    z: Tensor
    M: Tensor
    scale: float


def refusal(q: Tensor) -> str | None:
    """Why the compiled kernel can't compute attention of such queries, or None."""
    if type(q) is not Tensor or torch.compiler.is_compiling():
        return "A traced call is computed in plain PyTorch."
    if not q.is_cpu or q.dtype not in DTYPES:
        return f"The compiled kernel of hybrid attention is for floating numbers on CPUs; got {q.dtype} on {q.device}."
    return library.refusal()


def forward(call: HybridCall) -> tuple[Tensor, ...]:
    """o (b, h, t, e), ρ (b, h, t), and S, z, M behind; zeros at what is no token."""
    q, kind = call.q, wide(call.q.dtype)
    o = q.new_zeros(*q.shape[:3], call.v.shape[3], dtype=call.v.dtype)
    share = q.new_zeros(q.shape[:3], dtype=kind)
    before = tuple(x.contiguous() for x in (call.S, call.z, call.M))
    after = tuple(torch.empty_like(x) for x in before)
    if call.phi_q is None:
        after = before
    torch.ops.tarnn_cpu.hybrid_forward(*call[:11], *before, o, share, *after, call.scale)
    return o, share, *after
