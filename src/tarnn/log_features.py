"""Sums in units of each feature's own maximum, for maps whose features peak at different keys, many nats apart.

A map with `log_features` gives y_ic = log φ(q_i)_c and x_jc = log φ(k_j)_c. Under one maximum per head, features far below
it would underflow, and queries that use these alone would lose their keys. With

    M_ic = max(M_(i−1)c + log_decay_i, x_ic)      running maximum of feature c: a constant under autograd, and it cancels
    U_i  = max_c (y_ic + M_ic)                    the same for query i

all exponents are ≤ 0, and of each query's largest terms near 0:

    e^(x_jc − M_jc)   features of keys        M_(i−1)c + log_decay_i − M_ic   their decay, per channel
    e^(y_ic + M_ic − U_i)   features of queries, whose log-weight is U_i

So the op itself, with a decay per channel, computes sums in units of e^M. M_i depends on keys j ≤ i alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.numerics import finite, widest


class Scaled(NamedTuple):
    """Features in units of their maxima, and what this does to sums."""

    q: Tensor  # (b, h, t, f)
    k: Tensor  # (b, g, s, f)
    log_decay: Tensor | None  # (b, g, s, f), causal only
    U: Tensor  # (b, h, t)  log-weights of queries
    M: Tensor  # (n, g, f)  maxima after the last key; −∞: no key


def causal_units(y: Tensor, x: Tensor, log_decay: Tensor | None, M: Tensor, cu_seqlens: Tensor | None = None) -> Scaled:
    """y (b, h, t, f) and x (b, g, t, f), −∞ where there is no key; log_decay (b, g, t, 1 or f); M (n, g, f) before."""
    most, keep = _running(x, log_decay, M, cu_seqlens)
    q, U = _queries(y, most)
    behind = most[:, :, -1] if most.shape[2] else M
    if cu_seqlens is not None:
        last, some = (cu_seqlens[1:].long() - 1).clamp(min=0), cu_seqlens.diff() > 0
        behind = torch.where(some[:, None, None], most[0][:, last].transpose(0, 1), M) if most.shape[2] else M
    return Scaled(q, (x - finite(most)).exp(), keep, U, behind)


def full_units(y: Tensor, x: Tensor, M: Tensor, cu_seqlens: Tensor | None = None) -> Scaled:
    """Without causality: all queries of a sequence see all of its keys, and those of the state before."""
    if cu_seqlens is None:
        most = torch.maximum(x.detach().amax(2), M) if x.shape[2] else M
        q, U = _queries(y, most[:, :, None])
        return Scaled(q, (x - finite(most)[:, :, None]).exp(), None, U, most)
    which = _sequence_of(torch.arange(x.shape[2], device=x.device), cu_seqlens)
    index = which[:, None, None].expand(-1, *M.shape[1:])
    most = M.scatter_reduce(0, index, x.detach()[0].transpose(0, 1), "amax")
    of_keys = most[which].transpose(0, 1)[None]  # (1, g, t, f)
    q, U = _queries(y, of_keys)
    return Scaled(q, (x - finite(of_keys)).exp(), None, U, most)


def _queries(y: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """e^(y + M − U) and U, for M (b, g, t or 1, f)."""
    seen = y.unflatten(1, (most.shape[1], -1)) + most[:, :, None]  # (b, g, r, t, f)
    U = finite(seen.detach().amax(-1))
    return (seen - U[..., None]).exp().flatten(1, 2), U.flatten(1, 2)


def _running(x: Tensor, log_decay: Tensor | None, M: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """M_i, and the decay in its units, both (b, g, t, f)."""
    t, tokens = x.shape[2], torch.arange(x.shape[2], device=x.device)
    if cu_seqlens is None:
        which, starts, first = torch.zeros_like(tokens), tokens == 0, M[:, :, None]
    else:
        which = _sequence_of(tokens, cu_seqlens)
        starts, first = tokens == cu_seqlens[which], M[which].transpose(0, 1)[None]
    before = torch.where(starts[:, None], first, -torch.inf)  # what a sequence begins with
    decay = torch.zeros_like(x[..., :1]) if log_decay is None else log_decay
    kind = x.dtype if log_decay is None else widest(x.device)
    most = _scan(torch.maximum(x, before + decay).detach().to(kind), decay.detach().to(kind), which)
    most = most.to(x.dtype)
    last = torch.where(starts[:, None], before, torch.nn.functional.pad(most, (0, 0, 1, 0), value=-torch.inf)[:, :, :t])
    change = (last.to(kind) - finite(most).to(kind)).masked_fill(last == -torch.inf, 0.0)
    return most, (change + decay).to(x.dtype)


def _scan(most: Tensor, decay: Tensor, which: Tensor) -> Tensor:
    """m_i = max(m_i, m_(i−1) + decay_i) within each sequence: by doubling, so that −∞ costs no digits. which (t,)"""
    t, reach = most.shape[2], 1
    pad = torch.nn.functional.pad
    while reach < t:
        other = which[reach:] != which[:-reach]  # masked, since a NaN of another sequence would outlast a decay of −∞
        earlier = (most[:, :, :-reach] + decay[:, :, reach:]).masked_fill(other[:, None], -torch.inf)
        most = torch.maximum(most, pad(earlier, (0, 0, reach, 0), value=-torch.inf))
        decay = decay + pad(decay[:, :, :-reach], (0, 0, reach, 0))
        reach *= 2
    return most


def _sequence_of(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which packed sequence each token belongs to."""
    return torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True)
