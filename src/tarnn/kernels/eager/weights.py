"""What decay and key log-weights do to a chunk: the factors between its queries, its keys and the state.

For chunk positions i ≥ j, with w_j the key's log-weight and D_ij = Σ_{j<l≤i} log_decay_l,

    M_i     = max(M_in + D_i0, max_j (w_j + D_ij))      running maximum: a constant under autograd, and it cancels
    pair_ij = e^(w_j + D_ij − M_i)       key j as query i sees it
    query_i = e^(M_in + D_i0 − M_i)      the state before the chunk as query i sees it (D_i0: all decay up to i)
    key_j   = e^(w_j + D_cj − M_out)     key j as it enters the state behind the chunk
    keep    = e^(M_in + D_c0 − M_out)    the state before the chunk in the state behind it

so every factor is ≤ 1. D is summed term by term, never as a difference of prefix sums: a decay of −∞ (a reset)
or −10⁶ costs its neighbours no digits. A decay with channels has D (…, f); then M uses the largest channel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.numerics import finite


class Weights(NamedTuple):
    """All None for a plain sum. x is 1, or f where the decay has channels; n chunks of c positions."""

    pair: Tensor | None = None  # (b, g, n, c, c, x), 0 above the diagonal
    query: Tensor | None = None  # (b, g, n, c, x)
    key: Tensor | None = None  # (b, g, n, c, x)
    keep: Tensor | None = None  # (b, g, n, x)
    M: Tensor | None = None  # (b, g, n, c)  M_i, with 0 in the place of −∞ (no key so far)
    M_out: Tensor | None = None  # (b, g)     behind the last chunk; may be −∞


def chunk_weights(log_decay: Tensor | None, w: Tensor | None, M: Tensor | None) -> Weights:
    """log_decay (b, g, n, c, x) or None, w (b, g, n, c) or None, M (b, g) the maximum before, None without w."""
    if log_decay is None and w is None:
        return Weights()
    if log_decay is None:
        assert w is not None
        log_decay = torch.zeros_like(w)[..., None]
    between, since = decay_sums(log_decay)  # (b, g, n, c, c, x), (b, g, n, c, x)
    to_end = between[..., -1, :, :]
    if w is None:
        return Weights(between.exp(), since.exp(), to_end.exp(), since[..., -1, :].exp())
    assert M is not None, "log-weights need the maximum before them"
    # a log-weight that is not finite is in no maximum: earlier rows would see it there
    M_rows, M_in, M_out = _running_max(log_decay, w.nan_to_num(-torch.inf, -torch.inf, -torch.inf), M)
    rows, last = finite(M_rows), finite(M_rows[..., -1])
    return Weights(
        (between + (w[..., None, :] - rows[..., :, None])[..., None]).exp(),
        (M_in[..., None, None] + since - rows[..., None]).exp(),
        (w[..., None] + to_end - last[..., None, None]).exp(),
        (M_in[..., None] + since[..., -1, :] - last[..., None]).exp(),
        rows,
        M_out,
    )


def decay_sums(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """D_ij (…, c, c, x), −∞ above the diagonal, and D_i0 (…, c, x), both summed term by term."""
    c = log_decay.shape[-2]
    lower = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).tril()
    terms = log_decay[..., :, None, :].masked_fill(~lower.tril(-1)[..., None], 0.0)  # row l, column j: j < l
    return terms.cumsum(-3).masked_fill(~lower[..., None], -torch.inf), log_decay.cumsum(-2)


@torch.no_grad()
def _running_max(log_decay: Tensor, w: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M_i (b, g, n, c), M before each chunk (b, g, n), and M behind the last (b, g)."""
    between, since = decay_sums(log_decay.amax(-1, keepdim=True))
    local = (between.squeeze(-1) + w[..., None, :]).amax(-1)  # (b, g, n, c): over the chunk's own keys
    since = since.squeeze(-1)
    before = [M]
    for n in range(w.shape[2]):
        before.append(torch.maximum(before[-1] + since[:, :, n, -1], local[:, :, n, -1]))
    M_in = torch.stack(before[:-1], dim=2)
    return torch.maximum(M_in[..., None] + since, local), M_in, before[-1]
