"""The delta rule in plain PyTorch, any device: the backend that is always there.

Time is cut into chunks of c positions. With G_i the sum of a chunk's log-decays up to i, Q^g = Q ⊙ e^G, K^g = K ⊙ e^G,
K^d = K ⊙ e^(G_c − G), B = Diag(β), and S the state before the chunk,

    A_ij = Σ_d K_id K_jd e^(G_id − G_jd)  (j < i)        P_ij = Σ_d Q_id K_jd e^(G_id − G_jd)  (j ≤ i)
    (I + B A) U = B (V − K^g S)        O = Q^g S + P U        S ← e^(G_c) S + K^dᵀ U

(q normalised and scaled). One triangular system a chunk, solved by substitution: the inverse as a product of powers loses every
digit where keys repeat. Each e^(G_i − G_j) is of a sum of log-decays between j and i, so it is at most 1, whatever they are:
−∞, or −5 a token. Sums and states are float32 (float64 for float64 inputs).

Kept for backward are the inputs and one state in 256 tokens: `backward` computes the others again, segment by segment, from
the last to the first. `forward` and `step` are made of differentiable operations, for second derivatives. Chunks and segments
start at the same positions in a prompt and in its pieces, if it is cut at multiples of 64.

Yang et al. 2024 (arXiv 2406.06484, eq. 8–11; 2412.06464, eq. 12–15), in the form with one system in place of two.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.delta import Call, Gradients, Outputs
from tarnn.kernels.eager import delta_chunks, packed, refusal as refusal
from tarnn.kernels.eager.delta_chunks import normalized, open_chunk
from tarnn.kernels.eager.packed import in_time
from tarnn.numerics import full_precision

CHUNK = 64
CHUNK_WITH_CHANNELS = 16  # its (c × c) decays have a third axis, d
SEGMENT = 256  # positions: a multiple of both


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.forward(_whole, call, cuts, call.in_time, call.per_sequence)
        return _whole(call, keeping=for_backward and not torch.is_grad_enabled())  # else autograd keeps what it needs


def backward(call: Call, returned: Any) -> Gradients:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.backward(_backward, call, returned, cuts, call.in_time, call.per_sequence)
        return _backward(call, returned)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token: S ← e^g S + β k (v − e^g Sᵀk)ᵀ, o = scale·Sᵀq."""
    with full_precision(call.q):
        q, k, v, beta, log_decay, S = _token(call)
        if log_decay is not None:
            keep = log_decay.exp()
            S = S.mul_(keep) if inplace else S * keep
        error = beta * (v - k.mT @ S)  # (b, n, 1, e)
        S = S.addcmul_(k, error) if inplace else torch.addcmul(S, k, error)
        o = call.scale * (q @ S)  # (b, n, r, e)
        return Outputs(o.flatten(1, 2)[:, :, None].to(call.q.dtype), S)


def _token(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """q (b, n, r, d), k (b, n, d, 1), v (b, n, 1, e), β (b, n, 1, 1), log_decay (b, n, 1 or d, 1) and S, in the wide dtype."""
    n = call.num_states
    q, k, v = (x.to(call.dtype) for x in (call.q, call.k, call.v))
    q, k = normalized(q, call.norm_eps), normalized(k, call.norm_eps)
    q = q.repeat_interleave(n // q.shape[1], 1)[:, :, None] if q.shape[1] < n else q.unflatten(1, (n, -1))
    k = k.repeat_interleave(n // k.shape[1], 1)
    decay = call.log_decay
    if decay is not None:
        decay = decay.mT if decay.ndim == 4 else decay[..., None]
    S = call.S if call.S is not None else call.new_state().zero_()
    return q.squeeze(3), k.mT, v, call.beta[..., None], decay, S


# --- all tokens


def _chunks(call: Call, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of positions start:stop begin and end."""
    c = CHUNK_WITH_CHANNELS if call.has_channels else CHUNK
    return ((i, min(i + c, stop)) for i in range(start, stop, c))


def _segment(call: Call) -> int:
    c = CHUNK_WITH_CHANNELS if call.has_channels else CHUNK
    return c * max(2, SEGMENT // c)


def _by_key_heads(S: Tensor, call: Call) -> Tensor:
    """(b, n, …) as (b, g, n/g, …)"""
    return S.unflatten(1, (call.k.shape[1], -1))


def _whole(call: Call, keeping: bool = False) -> Outputs:
    """The outputs of a call that isn't packed; `keeping` the states before all segments but the first, (count, b, n, d, e)."""
    b, heads, t = call.q.shape[0], max(call.q.shape[1], call.v.shape[1]), call.q.shape[2]
    S = _by_key_heads(call.new_state().zero_() if call.S is None else call.S, call)
    outs, kept = [call.q.new_empty(b, heads, 0, call.v.shape[3])], []
    for start, stop in _chunks(call, 0, t):
        if keeping and start and start % _segment(call) == 0:
            kept.append(S.flatten(1, 2))
        out, S = delta_chunks.forward(open_chunk(call, start, stop), S)
        outs.append(out.flatten(1, 3).to(call.q.dtype))
    S = S.flatten(1, 2).clone(memory_format=torch.contiguous_format)
    return Outputs(in_time(call, outs), S, torch.stack(kept) if kept else None)


def _backward(call: Call, returned: Any) -> Gradients:
    """The gradients of a call that isn't packed, from its last segment to its first."""
    gradients, segment = call.new_gradients(), _segment(call)
    g, n, t = call.k.shape[1], call.num_states, call.q.shape[2]
    S = call.new_state().zero_() if call.S is None else call.S
    kept = _whole(call, keeping=True).kept if returned.kept is None and t > segment else returned.kept
    states = [S, *(() if kept is None else kept)]
    R = _by_key_heads(torch.zeros_like(S) if returned.grad_S is None else returned.grad_S.to(call.dtype), call)
    grad_o = call.new_o().zero_() if returned.grad_o is None else returned.grad_o
    for start, S in reversed(list(zip(range(0, t, segment), states))):
        S, opened = _by_key_heads(S, call), []
        for at in _chunks(call, start, min(start + segment, t)):
            chunk = open_chunk(call, *at)
            opened.append((at, chunk, S))
            S = delta_chunks.behind(chunk, S, delta_chunks.solve(chunk, S))
        while opened:
            at, chunk, S = opened.pop()
            sent = grad_o[:, :, slice(*at)].to(call.dtype).unflatten(1, (g, n // g, -1))
            found, R = delta_chunks.backward(chunk, S, sent, R)
            for name, x in delta_chunks.of_inputs(call, *at, chunk, found).items():
                getattr(gradients, name)[:, :, slice(*at)] = x
    return gradients if call.S is None else gradients._replace(S=R.flatten(1, 2))
