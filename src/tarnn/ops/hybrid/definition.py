"""The definition of hybrid attention, in plain torch: what every fast path is held against, in float64."""

import torch
from torch import Tensor

from tarnn.ops.linear.definition import pair_log_weight


def hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far_weight: Tensor | None,
    *,
    causal: bool,
    window: int,
    sinks: int,
    scale: float,
    key_mask=None,
    log_decay=None,
    softcap: float | None = None,
    exact_queries: Tensor | None = None,
    slots: int = 0,
    score: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact softmax over near keys and sinks, estimated weights for all others, one denominator; O(t²).

    q (b, h, t, d), k (b, g, t, d), v (b, g, t, e); far_weight (b, h, t, t): log of the estimated weight of each pair, or
    None: keys that are not exact are not seen at all. Places are counted over the keys that key_mask (b, t) leaves
    in. Key j is exact for query i where its place is less than `window` from i's, or less than `sinks`, or where
    i's place is one of `exact_queries`. log_decay (b, g, t): each key fades
    by the decays of the real tokens behind it up to i, exact or not. slots c, score (b, g, t): of the keys that i sees and
    that are not exact, the c of the highest scores are, too; of equal ones the earlier. Where not causal, the c highest of
    the whole row are, but for sinks.
    softcap c: products become c·tanh(product / c).
    Returns o (b, h, t, e), zeros at masked tokens and where nothing is seen, and ρ (b, h, t), the estimated keys' share
    of the weight.
    """
    (b, h, t, _), g = q.shape, k.shape[1]
    real = torch.ones(b, t, dtype=torch.bool) if key_mask is None else key_mask
    place = real.long().cumsum(-1) - 1
    distance = place[:, :, None] - place[:, None, :]
    seen = real[:, None, :] & real[:, :, None]
    if causal:
        seen = seen & torch.ones(t, t, dtype=torch.bool).tril()
    exact = (distance.abs() < window) | (place[:, None, :] < sinks)
    always = place < sinks
    if exact_queries is not None:
        exact = exact | torch.isin(place, exact_queries)[:, :, None]
    exact = exact[:, None].expand(b, g, t, t)
    if slots and score is not None:
        for i in range(t):
            left = (seen[:, i] & (~exact[:, :, i].any(1) if causal else ~always))[:, None]
            better = (score[:, :, None] > score[..., None]) | (
                (score[:, :, None] == score[..., None]) & torch.ones(t, t, dtype=torch.bool).tril(-1)
            )
            rank = (better & left[:, :, None]).sum(-1)  # (b, g, t)
            exact = exact.clone()
            exact[:, :, i] |= left & (rank < slots)
    exact = exact.repeat_interleave(h // g, dim=1)
    seen = seen[:, None]
    product = scale * q @ k.repeat_interleave(h // g, dim=1).mT
    if softcap is not None:
        product = softcap * torch.tanh(product / softcap)
    weight = product.masked_fill(~(seen & exact), -torch.inf)
    far = seen & ~exact
    if far_weight is not None:
        weight = torch.where(far, far_weight, weight)
    if log_decay is not None:
        faded = pair_log_weight(t, t, causal=True, key_mask=key_mask, log_decay=log_decay, like=v)[..., 0]
        weight = weight + faded.expand(b, g, t, t).repeat_interleave(h // g, dim=1)
    total = weight.logsumexp(-1, keepdim=True)
    total = torch.where(total == -torch.inf, 0.0, total)
    p = (weight - total).exp()
    v = v.masked_fill(~real[:, None, :, None], 0.0).repeat_interleave(h // g, dim=1)
    return p @ v, (p * far).sum(-1)
