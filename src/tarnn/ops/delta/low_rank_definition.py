"""The definition of the delta rule of low rank, in plain torch: what every fast path is held against, in float64."""

import torch
from torch import Tensor


def low_rank_delta(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, log_decay=None, scale: float, key_mask=None, S=None
) -> tuple[Tensor, Tensor]:
    """Token by token, S ← (Diag(e^g) + b aᵀ) S + k vᵀ and o = scale·Sᵀq.

    q, k, a, b (batch, h, t, d), v (batch, h, t, e), log_decay (h,), (batch, h, t) or (batch, h, t, d), key_mask (batch, t),
    S (batch, h, d, e) or None for zeros. Returns o (batch, h, t, e) and the last S.
    """
    rows, h, t, d = q.shape
    S = v.new_zeros(rows, h, d, v.shape[3]) if S is None else S
    if log_decay is None:
        log_decay = q.new_zeros(h)
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(rows, h, t)
    g = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    outputs = [v.new_empty(rows, h, 0, v.shape[3])]
    for i in range(t):
        transition = torch.diag_embed(g[:, :, i].exp().expand(rows, h, d)) + b[:, :, i, :, None] * a[:, :, i, None]
        after = transition @ S + k[:, :, i, :, None] * v[:, :, i, None]
        S = after if key_mask is None else torch.where(key_mask[:, i, None, None, None], after, S)
        outputs.append(scale * (S.mT @ q[:, :, i, :, None]).mT)
    return torch.cat(outputs, 2), S
