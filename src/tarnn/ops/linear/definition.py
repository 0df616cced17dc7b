"""The definition of linear attention. Every fast path is held against it, in float64.

Plain torch, any dtype, no imports of ours, and no thought of speed: the quadratic form says *what* is
computed, the recurrent form says *why* it can be had in O(1) per token. Both take features, not q and k:

    W_ij = w_j + Σ_{j<l≤i} log_decay_l          log-weight of key j seen from position i; from behind, where not causal,
    W_ij = w_j + Σ_{i≤l<j} log_decay_back_l     of key j > i
    M_i  = max_j W_ij                           over the keys that i may see
    o_i  = Σ_j e^(W_ij − M_i) φ(q_i)·φ(k_j) v_j / (Σ_j e^(W_ij − M_i) φ(q_i)·φ(k_j) + eps)

or, with normalize="at_least_one" (mLSTM), over max(|Σ_j e^(W_ij − M_i) φ(q_i)·φ(k_j)|, e^(−M_i)), so that M_i cancels.

Equations 4–12 and 16–20 of Katharopoulos et al. 2020 (arXiv 2006.16236) are the case W = 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def pair_log_weight(
    t: int,
    s: int,
    *,
    causal: bool,
    key_mask=None,
    log_decay=None,
    log_decay_back=None,
    key_log_weight=None,
    like: Tensor,
) -> Tensor:
    """W, (b, g, t, s) or (b, g, t, s, f) where the decay has channels; −inf where i may not see j.

    A masked key is absent: it adds nothing, and no time passes at it (its decay counts as zero).
    """
    w = like.new_zeros(1, 1, t, s, 1)
    if key_log_weight is not None:
        w = w + key_log_weight[:, :, None, :, None]
    for decay, behind in ((log_decay, False), (log_decay_back, True)):
        if decay is None:
            continue
        per_channel = decay if decay.ndim == 4 else decay[..., None]  # (b, g, t, f or 1)
        if key_mask is not None:
            per_channel = per_channel.masked_fill(~key_mask[:, None, :, None], 0.0)
        rows = []
        for i in range(t):
            # summed term by term, not as a difference of prefix sums: −inf − −inf would be NaN
            rows.append(
                torch.stack([per_channel[:, :, _between(i, j, behind)].sum(2) for j in range(s)], dim=2)
                if s
                else per_channel.new_zeros(*per_channel.shape[:2], 0, per_channel.shape[-1])
            )
        w = w + torch.stack(rows, dim=2) if t else w
    if causal:
        future = torch.ones(t, s, dtype=torch.bool, device=like.device).triu(1)
        w = w.masked_fill(future[None, None, :, :, None], -torch.inf)
    if key_mask is not None:
        w = w.masked_fill(~key_mask[:, None, None, :, None], -torch.inf)
    return w


def _between(i: int, j: int, behind: bool) -> slice:
    """The tokens that fade key j on its way to query i; of a side that it is not on, none."""
    return slice(i, j) if behind else slice(j + 1, i + 1)


def for_values(fq: Tensor, fk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with a head for each of values, where there are more of these."""
    m, g = v.shape[1], fk.shape[1]
    return (fq.repeat_interleave(m // g, 1), fk.repeat_interleave(m // g, 1)) if m > g else (fq, fk)


def quadratic(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    *,
    causal: bool,
    normalize: bool | str = True,
    eps: float = 0.0,
    key_mask=None,
    log_decay=None,
    log_decay_back=None,
    key_log_weight=None,
) -> Tensor:
    """Linear attention written as softmax attention is: a (t, s) matrix of weights, O(t·s) time and memory.

    fq: (b, h, t, f), fk: (b, g, s, f), v: (b, g, s, e), with h a multiple of g. key_mask: bool (b, s).
    log_decay, log_decay_back: ≤ 0, (g,), (b, g, s) or (b, g, s, f). key_log_weight: (b, g, s). Returns (b, h, t, e).
    Unnormalised outputs are e^M times the sums, so they are free of M. Where v has more heads, (b, m, s, e), each query and
    key head is that of m/g of them, and m stands for g and h in what is said above.
    """
    fq, fk = for_values(fq, fk, v)
    (b, h, t, _), (g, s) = fq.shape, fk.shape[1:3]
    log_decay, log_decay_back = (
        x[None, :, None].expand(b, g, s) if x is not None and x.ndim == 1 else x for x in (log_decay, log_decay_back)
    )
    decays = {"log_decay": log_decay, "log_decay_back": log_decay_back}
    w = pair_log_weight(t, s, causal=causal, key_mask=key_mask, **decays, key_log_weight=key_log_weight, like=v)
    w = w.expand(b, g, t, s, -1)
    m = w.detach().amax((-1, -2), keepdim=True) if s else w.new_zeros(b, g, t, 1, 1)
    m = torch.where(m == -torch.inf, 0.0, m)
    weight = (w - m).exp().repeat_interleave(h // g, dim=1)
    fk, v, m = (x.repeat_interleave(h // g, dim=1) for x in (fk, v, m))
    pairs = (fq[:, :, :, None, :] * weight * fk[:, :, None, :, :]).sum(-1)  # (b, h, t, s)
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0.0)
        pairs = pairs.masked_fill(~key_mask[:, None, None, :], 0.0)
    num, den = pairs @ v, pairs.sum(-1, keepdim=True)
    if normalize == "at_least_one":
        return num / torch.maximum(den.abs(), (-m[..., 0]).exp())
    if not normalize:
        return num * m[..., 0].exp()
    empty = den == 0
    return torch.where(empty, 0.0, num / torch.where(empty, 1.0, den + eps))


class RecurrentState(NamedTuple):
    S: Tensor  # (b, g, f, e)   Σ e^(w_j + decay − M) φ(k_j) v_jᵀ
    z: Tensor  # (b, g, f)      the same sum without v
    M: Tensor  # (b, g)         the log-weight that S and z are scaled by


def recurrent(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    *,
    normalize: bool | str = True,
    eps: float = 0.0,
    key_mask=None,
    log_decay=None,
    key_log_weight=None,
    state: RecurrentState | None = None,
) -> tuple[Tensor, RecurrentState]:
    """Causal linear attention as the RNN that it is, one token at a time. Shapes as in `quadratic`."""
    fq, fk = for_values(fq, fk, v)
    (b, h, t, f), (g, e) = fq.shape, (v.shape[1], v.shape[3])
    if state is None:
        state = RecurrentState(v.new_zeros(b, g, f, e), v.new_zeros(b, g, f), v.new_full((b, g), -torch.inf))
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(b, g, t)
    S, z, M = state
    outputs = []
    for i in range(t):
        seen = torch.ones(b, 1, dtype=torch.bool) if key_mask is None else key_mask[:, i, None]
        seen = seen.to(v.device)
        decay = v.new_zeros(b, g, 1) if log_decay is None else log_decay[:, :, i].reshape(b, g, -1)
        decay = torch.where(seen[..., None], decay, 0.0)
        w = v.new_zeros(b, g) if key_log_weight is None else key_log_weight[:, :, i]
        w = torch.where(seen, w, -torch.inf)
        new_M = torch.maximum(M + decay.amax(-1), w).detach()
        finite = torch.where(new_M == -torch.inf, 0.0, new_M)
        keep = (M[..., None] + decay - finite[..., None]).exp()  # (b, g, f or 1)
        add = (w - finite).exp()[..., None]  # (b, g, 1)
        phi_k = torch.where(seen[..., None], fk[:, :, i], 0.0) * add
        S = keep[..., None] * S + phi_k[..., None] * torch.where(seen[..., None], v[:, :, i], 0.0)[..., None, :]
        z = keep * z + phi_k
        M = new_M
        phi_q = fq[:, :, i].unflatten(1, (g, h // g))  # (b, g, r, f)
        num, den = phi_q @ S, phi_q @ z[..., None]
        if normalize == "at_least_one":
            out = num / torch.maximum(den.abs(), (-finite).exp()[..., None, None])
        elif normalize:
            empty = den == 0
            out = torch.where(empty, 0.0, num / torch.where(empty, 1.0, den + eps))
        else:
            out = num * finite[..., None, None].exp()
        outputs.append(out.flatten(1, 2))
    o = torch.stack(outputs, dim=2) if outputs else v.new_zeros(b, h, 0, e)
    return o, RecurrentState(S, z, M)
