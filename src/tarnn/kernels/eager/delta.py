"""The delta rule in plain PyTorch, any device: the backend that is always there.

Time is cut into chunks of c positions. With G_i the sum of a chunk's log-decays up to i, Q^g = Q ⊙ e^G, K^g = K ⊙ e^G,
K^d = K ⊙ e^(G_c − G), B = Diag(β), and S the state before the chunk,

    A_ij = Σ_d K_id K_jd e^(G_id − G_jd)  (j < i)        P_ij = Σ_d Q_id K_jd e^(G_id − G_jd)  (j ≤ i)
    (I + B A) U = B (V − K^g S)        O = scale·(Q^g S + P U)        S ← e^(G_c) S + K^dᵀ U

One triangular system a chunk, solved by substitution: the inverse as a product of powers loses every digit where keys repeat.
Each e^(G_i − G_j) is of a sum of log-decays between j and i, so it is at most 1, whatever they are: −∞, or −5 a token.
Sums and states are float32 (float64 for float64 inputs).

`forward` and `step` are made of differentiable operations. Where they are not traced, autograd calls `backward`, which runs
each segment of 256 tokens again from the state that was kept before it: beside the results lives one segment's worth of
temporaries. Chunks and segments start at the same positions in a prompt and in its pieces, if it is cut at multiples of 64.

Yang et al. 2024 (arXiv 2406.06484, eq. 8–11; 2412.06464, eq. 12–15), in the form with one system in place of two.
"""

import torch
from torch import Tensor

from tarnn.kernels.delta import IN_TIME, PER_SEQUENCE, Call, Gradients, Outputs, Returned
from tarnn.kernels.eager import packed, recomputed
from tarnn.kernels.eager.forward_pass import in_time
from tarnn.kernels.eager.weights import decay_sums
from tarnn.kernels.plain import known_finite
from tarnn.numerics import full_precision, marked, set_aside

CHUNK = 64
CHUNK_WITH_CHANNELS = 16  # its (c × c) decays have a third axis, d
SEGMENT = 256  # positions: a multiple of both


def refusal(call: Call) -> None:
    """None: it takes every call."""


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.forward(_whole, call, cuts, IN_TIME, PER_SEQUENCE)
        if for_backward and not torch.is_grad_enabled():  # else autograd keeps what it needs
            return _whole(call, _segment(call))
        return _whole(call)


def backward(call: Call, returned: Returned) -> Gradients:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.backward(_backward, call, returned, cuts, IN_TIME, PER_SEQUENCE)
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
    beta, decay = call.beta[..., None], call.log_decay
    if call.key_mask is not None:
        masked = ~call.key_mask[:, None, :, None]  # (b, 1, 1, 1)
        k, v, beta = (x.masked_fill(masked, 0.0) for x in (k, v, beta))
        decay = None if decay is None else decay.masked_fill(masked if decay.ndim == 4 else masked[..., 0], 0.0)
    q, k = _normalized(q, call.norm_eps), _normalized(k, call.norm_eps)
    q = q.repeat_interleave(n // q.shape[1], 1)[:, :, None] if q.shape[1] < n else q.unflatten(1, (n, -1))
    k = k.repeat_interleave(n // k.shape[1], 1) if k.shape[1] < n else k
    v = v.repeat_interleave(n // v.shape[1], 1) if v.shape[1] < n else v
    if decay is not None:
        decay = decay.mT if decay.ndim == 4 else decay[..., None]
    S = call.S if call.S is not None else _new_state(call)
    return q.squeeze(3), k.mT, v, beta, decay, S


def _new_state(call: Call) -> Tensor:
    return call.k.new_zeros(call.k.shape[0], call.num_states, call.k.shape[3], call.v.shape[3], dtype=call.dtype)


def _normalized(x: Tensor, norm_eps: float | None) -> Tensor:
    return x if norm_eps is None else x / (x.square().sum(-1, keepdim=True) + norm_eps).sqrt()


# --- all tokens


def _chunk_length(call: Call) -> int:
    return CHUNK_WITH_CHANNELS if call.has_channels else CHUNK


def _segment(call: Call) -> int:
    c = _chunk_length(call)
    return c * max(2, SEGMENT // c)


def _backward(call: Call, returned: Returned) -> Gradients:
    return recomputed.backward(_whole, call, returned, _segment(call), IN_TIME)


def _whole(call: Call, segment: int | None = None) -> Outputs:
    """The outputs of a call that isn't packed: each of g key heads has s states, each state r queries; s or r is 1.

    segment: keep the state before each so many tokens but the first ones.
    """
    (b, h, t, _), g, n = call.q.shape, call.k.shape[1], call.num_states
    S = (_new_state(call) if call.S is None else call.S).unflatten(1, (g, n // g))  # (b, g, s, d, e)
    outs, c, kept = [call.q.new_empty(b, max(h, n), 0, call.v.shape[3])], _chunk_length(call), []
    for start in range(0, t, c):
        if segment is not None and start and start % segment == 0:
            kept.append(S.flatten(1, 2))
        out, S = _chunk(call, start, min(start + c, t), S)
        outs.append(out.flatten(1, 3).to(call.q.dtype))
    S = S.flatten(1, 2).clone(memory_format=torch.contiguous_format)
    return Outputs(in_time(call, outs), S, torch.stack(kept) if kept else None)


def _chunk(call: Call, start: int, stop: int, S: Tensor) -> tuple[Tensor, Tensor]:
    """O (b, g, s, r, c, e) of a chunk, and the state behind it."""

    def part(x: Tensor) -> Tensor:  # a copy, so that a product's bits don't depend on where in memory x lies
        return x[:, :, start:stop].to(call.dtype).clone(memory_format=torch.contiguous_format)

    g, s = S.shape[1:3]
    q, k, v, beta = part(call.q), part(call.k), part(call.v), part(call.beta)[..., None]
    decay = None if call.log_decay is None else part(call.log_decay if call.has_channels else call.log_decay[..., None])
    if call.key_mask is not None:  # whatever stands there, NaN too, gets nowhere, and no time passes at it
        masked = ~call.key_mask[:, None, start:stop, None]
        k, v, beta = (x.masked_fill(masked, 0.0) for x in (k, v, beta))
        decay = None if decay is None else decay.masked_fill(masked, 0.0)
    q = call.scale * _normalized(q, call.norm_eps).unflatten(1, (g, 1, -1))  # (b, g, 1, r, c, d)
    k = _normalized(k, call.norm_eps)[:, :, None]  # (b, g, 1, c, d)
    v, beta = v.unflatten(1, (g, -1)), beta.unflatten(1, (g, s))  # (b, g, s, c, e), (b, g, s, c, 1)
    if decay is None:
        A, P, q_in, k_in, k_out, keep = (k @ k.mT).tril(-1), (q @ k[:, :, :, None].mT).tril(), q, k, k, None
    else:
        between, since = decay_sums(decay.unflatten(1, (g, s)))  # (b, g, s, c, c, x), (b, g, s, c, x)
        weights, since = between.exp(), since.exp()
        A, P = _products(k[:, :, :, None], k, weights)[:, :, :, 0].tril(-1), _products(q, k, weights).tril()
        q_in, k_in, k_out = q * since[:, :, :, None], k * since, k * weights[..., -1, :, :]
        keep = since[..., -1, :, None]  # (b, g, s, x, 1)
    U = torch.linalg.solve_triangular(beta * A, beta * (v - k_in @ S), upper=False, unitriangular=True)
    clean, spoilt = (U, None) if known_finite(U) else set_aside(U)
    out = q_in @ S[:, :, :, None] + P @ clean[:, :, :, None]
    if spoilt is not None:  # in each output from there on, and in none before: 0·NaN is NaN
        out = marked(out, (spoilt.cumsum(-1) > 0)[:, :, :, None].expand(out.shape[:-1]))
    return out, (S if keep is None else keep * S) + k_out.mT @ U


def _products(x: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """x_i·k_j, weighted, (b, g, s, r, c, c), of x (b, g, 1, r, c, d) and k (b, g, 1, c, d); garbage above the diagonal."""
    if weights.shape[-1] == 1:
        return (x @ k[:, :, :, None].mT) * weights[:, :, :, None, ..., 0]
    return (x[..., :, None, :] * (weights * k[..., None, :, :])[:, :, :, None]).sum(-1)
