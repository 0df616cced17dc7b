"""The delta rule of low rank in plain PyTorch, any device, by chunks.

With G_i the sum of log-decays up to token i of a chunk, Ḡ_i = G_i − g_i that before it, and S the state at the chunk's start,
z_i = aᵢᵀS_{i−1} is what token i reads. All z of a chunk come from one triangular system:

    A^x_ij = Σ a_i x_j e^(Ḡ_i − G_j), i > j       P^x_ij = Σ q_i x_j e^(G_i − G_j), i ≥ j       for x = k and x = b
    Z = (I − A^b)⁻¹ (A^k V + (a ⊙ e^Ḡ) S)        O = (q ⊙ e^G) S + P^k V + P^b Z
    S ← e^(G_c) S + (k ⊙ e^(G_c − G))ᵀ V + (b ⊙ e^(G_c − G))ᵀ Z

Each exponent is a sum of decays, so ≤ 0, and never a difference of prefix sums: however strong the decay, nothing overflows.
The system is solved by substitution. (Products of powers of A lose all digits where keys repeat.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.eager import packed, refusal as refusal
from tarnn.kernels.eager.packed import in_time
from tarnn.kernels.eager.segments import chunk_weights
from tarnn.kernels.low_rank_delta import Call, Outputs
from tarnn.kernels.tracing import known_finite
from tarnn.numerics import full_precision, marked, set_aside

CHUNK = 16  # what is read and what is written may cancel; in longer chunks, long sums of both would
SEGMENT = 256  # positions whose pairs of tokens are weighted at a time


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.forward(_whole, call, cuts, call.in_time, call.per_sequence)
        return _whole(call)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token. In place, S is written into."""
    with full_precision(call.q):
        q, k, v, a, b = (x.to(call.dtype).squeeze(2) for x in call[:5])
        S: Any = call.S
        read = (a[:, :, None] @ S).squeeze(2)  # (b, h, e)
        if call.log_decay is not None:
            keep = call.log_decay.reshape(*k.shape[:2], call.log_decay.shape[-1], 1).exp()  # 1 or d
            S = S.mul_(keep) if inplace else S * keep
        for x, y in ((b, read), (k, v)):
            S = S.addcmul_(x[..., None], y[:, :, None]) if inplace else torch.addcmul(S, x[..., None], y[:, :, None])
        return Outputs((call.scale * q[:, :, None] @ S).to(call.q.dtype), S)


def _whole(call: Call) -> Outputs:
    """The outputs of a call that isn't packed."""
    inputs, spoilt = _inputs(call)
    S = call.new_state().zero_() if call.S is None else call.S
    t, (q, k, v) = call.q.shape[2], (x.to(call.dtype) for x in call[:3])
    if not t:  # zeros that autograd knows where they come from, as for any other length
        S = S + k.mT @ v
    parts = [(q[:, :, :0] @ S).to(call.q.dtype)]
    per_segment = max(1, SEGMENT // CHUNK) * CHUNK
    whole = t - t % CHUNK
    for start in (*range(0, whole, per_segment), *([whole] if whole < t else [])):
        stop = min(start + per_segment, whole) if start < whole else t
        n = max(1, (stop - start) // CHUNK)
        segment: Any = [None if x is None else x[:, :, start:stop].unflatten(2, (n, -1)) for x in inputs]
        o, S = _segment(S, *segment)
        parts.append((call.scale * o).to(call.q.dtype))
    o = in_time(call, parts)
    if spoilt is not None:
        o = marked(o, spoilt.cumsum(2) > 0)
        S = S + torch.zeros_like(S).masked_fill(spoilt.any(2)[..., None, None], torch.nan)
    return Outputs(o, S.clone(memory_format=torch.contiguous_format))


def _inputs(call: Call) -> tuple[list[Tensor | None], Tensor | None]:
    """q, k, v, a, b and the log-decay (b, h, t, x) in the wide dtype, nothing at masked tokens, and which tokens (b, h, t)
    are not finite: these do nothing here, or a zero of a chunk's products would meet them before their time."""
    q, k, v, a, b = (x.to(call.dtype) for x in call[:5])
    decay = call.log_decay
    if decay is not None:
        decay = decay.to(call.dtype) if call.has_channels else decay.to(call.dtype)[..., None]
    if call.key_mask is not None:
        masked = ~call.key_mask[:, None, :, None]
        k, v, a, b = (x.masked_fill(masked, 0.0) for x in (k, v, a, b))
        decay = None if decay is None else decay.masked_fill(masked, 0.0)
    writes = [k, v, a, b] if decay is None else [k, v, a, b, decay.exp()]
    if known_finite(*writes):
        return [q, k, v, a, b, decay], None
    (k, v, a, b), rows = zip(*map(set_aside, (k, v, a, b)))
    spoilt = torch.stack(rows).any(0)
    if decay is not None:
        lost = decay.isnan() | (decay == torch.inf)
        decay, spoilt = decay.masked_fill(lost, 0.0), spoilt | lost.any(-1)
    return [q, k, v, a, b, decay], spoilt


class _Factors(NamedTuple):
    """How decays weigh the tokens of n chunks; x is 1, or d where the decay has channels."""

    reads: Tensor  # (b, h, n, c, c, x)  e^(Ḡ_i − G_j), 0 for i ≤ j
    sees: Tensor  # (b, h, n, c, c, x)  e^(G_i − G_j), 0 for i < j
    before: Tensor  # (b, h, n, c, x)  e^Ḡ
    since: Tensor  # (b, h, n, c, x)  e^G
    to_end: Tensor  # (b, h, n, c, x)  e^(G_c − G)
    keep: Tensor  # (b, h, n, x)  e^(G_c)


def _factors(log_decay: Tensor) -> _Factors:
    weights: Any = chunk_weights(log_decay, None, None)
    sees, since, to_end, keep, *_ = weights
    reads = pad(sees[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before = pad(since[..., :-1, :], (0, 0, 1, 0), value=1.0)
    return _Factors(reads, sees, before, since, to_end, keep)


def _segment(S: Tensor, q, k, v, a, b, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """o (b, h, l, e) of a segment, whose inputs are (b, h, n, c, ·), and S after it."""
    w = _factors(q.new_zeros(*q.shape[:4], 1) if log_decay is None else log_decay)
    reads_k, reads_b = _pairs(a, w.reads, k, b)
    sees_k, sees_b = _pairs(q, w.sees, k, b)
    read, seen = reads_k @ v, sees_k @ v
    a, q, entering = a * w.before, q * w.since, (k * w.to_end).mT @ v
    b, system, outputs = (b * w.to_end).mT, torch.eye(q.shape[3], dtype=q.dtype, device=q.device) - reads_b, []
    for i in range(q.shape[2]):
        right = read[:, :, i] + a[:, :, i] @ S
        z = torch.linalg.solve_triangular(system[:, :, i], right, upper=False, unitriangular=True)
        outputs.append(q[:, :, i] @ S + seen[:, :, i] + sees_b[:, :, i] @ z)
        S = w.keep[:, :, i, :, None] * S + entering[:, :, i] + b[:, :, i] @ z
    return torch.cat(outputs, 2), S


def _pairs(x: Tensor, weights: Tensor, *ys: Tensor) -> list[Tensor]:
    """Σ_d x_id weights_ijd y_jd (b, h, n, c, c), for each y."""
    if weights.shape[-1] == 1:
        return [(x @ y.mT) * weights.squeeze(-1) for y in ys]
    weighted = x[..., :, None, :] * weights
    return [(weighted * y[..., None, :, :]).sum(-1) for y in ys]
