"""The definition of softmax attention, in plain torch: what `op.py` is held against, in float64."""

import torch
from torch import Tensor


def softmax(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale=None, key_mask=None, key_log_weight=None) -> Tensor:
    """Softmax attention, O(t·s): o_i = Σ_j exp(scale·q_i·k_j + w_j) v_j / Σ_j exp(…). Zeros where i sees no key.

    With more keys than queries, causal means that the last query sees the last key.
    """
    h, t, d = q.shape[1:]
    g, s = k.shape[1:3]
    k, v = k.repeat_interleave(h // g, dim=1), v.repeat_interleave(h // g, dim=1)
    logits = q @ k.mT * (d**-0.5 if scale is None else scale)
    if key_log_weight is not None:
        logits = logits + key_log_weight.repeat_interleave(h // g, dim=1)[:, :, None, :]
    if causal:
        logits = logits.masked_fill(torch.ones(t, s, dtype=torch.bool, device=q.device).triu(1 + s - t), -torch.inf)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    if not s:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    m = logits.detach().amax(-1, keepdim=True)
    p = (logits - torch.where(m == -torch.inf, 0.0, m)).exp()
    z = p.sum(-1, keepdim=True)
    return p @ v / torch.where(z == 0, 1.0, z)
