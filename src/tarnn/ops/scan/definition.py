"""The definitions of both scans, token by token. Every fast path is held against them, in float64.

Plain torch, any dtype, no imports of ours, and no thought of speed. A masked token is absent: the state passes it as it is, and
its output is zero.
"""

import torch
from torch import Tensor


def diagonal_scan(x: Tensor, log_decay: Tensor, *, key_mask=None, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_i = e^log_decay_i ⊙ h_(i − 1) + x_i: all h (b, t, c), and the last (b, c)."""
    b, t, c = x.shape
    h, outputs = x.new_zeros(b, c) if h is None else h, []
    for i in range(t):
        there = _there(key_mask, x, i)
        h = torch.where(there, log_decay[:, i].exp() * h + x[:, i], h)
        outputs.append(torch.where(there, h, 0.0))
    return torch.stack(outputs, 1) if outputs else x, h


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D=None, *, key_mask=None, h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_i = e^(dt_i A) ⊙ h_(i − 1) + dt_i x_i B_iᵀ, o_i = h_i C_i + D ⊙ x_i: o (b, t, c), and the last h (b, c, n)."""
    b, t = x.shape[:2]
    h, outputs = x.new_zeros(b, *A.shape) if h is None else h, []
    for i in range(t):
        there = _there(key_mask, x, i)
        step = dt[:, i, :, None]  # (b, c, 1)
        h = torch.where(there[..., None], (step * A).exp() * h + step * x[:, i, :, None] * B[:, i, None], h)
        o = (h * C[:, i, None]).sum(-1)
        outputs.append(torch.where(there, o if D is None else o + D * x[:, i], 0.0))
    return torch.stack(outputs, 1) if outputs else x, h


def _there(key_mask, x: Tensor, i: int) -> Tensor:
    """Whether token i is there, (b, 1)."""
    if key_mask is None:
        return torch.ones(x.shape[0], 1, dtype=torch.bool, device=x.device)
    return key_mask[:, i, None]
