"""The definition of the delta rule. Every fast path is held against it, in float64.

Plain torch, any dtype, no imports of ours, and no thought of speed: the recurrent form says *what* is computed, token by
token; the quadratic form says the same of a whole sequence at once, by one triangular system:

    S_i = (I − β_i k_i k_iᵀ) e^(g_i) S_{i−1} + β_i k_i v_iᵀ          o_i = scale·S_iᵀ q_i
    A_ij = k_iᵀ e^(G_i − G_j) k_j (j < i)   P_ij = q_iᵀ e^(G_i − G_j) k_j (j ≤ i)   G_i = Σ_{l ≤ i} g_l
    (I + Diag(β) A) U = Diag(β) V           O = scale·P U

Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484, eq. 1–11);
with decays "Gated Delta Networks" (arXiv 2412.06464, eq. 10), with a decay for each channel "Kimi Linear" (arXiv 2510.26692).
"""

import torch
from torch import Tensor


def normalized(x: Tensor, norm_eps: float | None) -> Tensor:
    """x (…, d) over √(Σx² + norm_eps), or as it is."""
    return x if norm_eps is None else x / (x.square().sum(-1, keepdim=True) + norm_eps).sqrt()


def _spread(q, k, v, beta, log_decay, norm_eps, key_mask) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All with a head for each output: q, k, v (b, n, t, ·), β (b, n, t, 1), log_decay (b, n, t, 1 or d).

    What key_mask leaves out is nothing: β = 0 and no decay, whatever stands there.
    """
    heads, n = max(q.shape[1], v.shape[1]), max(k.shape[1], v.shape[1])
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(beta.shape)
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    beta = beta[..., None]
    if key_mask is not None:
        masked = ~key_mask[:, None, :, None]
        k, v, beta, log_decay = (x.masked_fill(masked, 0.0) for x in (k, v, beta, log_decay))
    q, k = normalized(q, norm_eps), normalized(k, norm_eps)
    assert heads % n == 0
    q, k, v, beta, log_decay = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v, beta, log_decay))
    return q, k, v, beta, log_decay


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    log_decay: Tensor | None = None,
    norm_eps: float | None = None,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token at a time. q (b, h, t, d), k (b, g, t, d), v (b, m, t, e), β (b, n, t) with n = max(g, m); state (b, n, d, e).

    log_decay: ≤ 0, (n,), (b, n, t) or (b, n, t, d). Returns o (b, max(h, m), t, e) and the state behind.
    """
    n, heads = beta.shape[1], max(q.shape[1], v.shape[1])
    q, k, v, beta, log_decay = _spread(q, k, v, beta, log_decay, norm_eps, key_mask)
    S = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    S = S if state is None else state.repeat_interleave(heads // n, dim=1)
    outputs = []
    for i in range(q.shape[2]):
        S = log_decay[:, :, i, :, None].exp() * S
        error = v[:, :, i] - (k[:, :, i, :, None] * S).sum(-2)
        S = S + k[:, :, i, :, None] * (beta[:, :, i] * error)[..., None, :]
        outputs.append(scale * (q[:, :, i, :, None] * S).sum(-2))
    o = torch.stack(outputs, dim=2) if outputs else v.new_zeros(*v.shape[:2], 0, v.shape[3])
    return o, S[:, :: heads // n]


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    log_decay: Tensor | None = None,
    norm_eps: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The whole sequence at once, O(t²) time and memory, from no state. Shapes as in `recurrent`; returns o."""
    q, k, v, beta, log_decay = _spread(q, k, v, beta, log_decay, norm_eps, key_mask)
    t = q.shape[2]
    lower = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    # summed term by term, not as a difference of prefix sums: −inf − −inf would be NaN
    terms = log_decay[:, :, :, None].masked_fill(~lower.tril(-1)[..., None], 0.0)  # row l, column j: j < l
    decay = terms.cumsum(2).masked_fill(~lower[..., None], -torch.inf).exp()  # (b, n, t, t, 1 or d)
    A = ((k[:, :, :, None] * k[:, :, None]) * decay).sum(-1).tril(-1)
    P = ((q[:, :, :, None] * k[:, :, None]) * decay).sum(-1)
    U = torch.linalg.solve_triangular(beta * A, beta * v, upper=False, unitriangular=True)
    return scale * P @ U


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
