"""One chunk of the delta rule, forward and backward: the matrix products that `delta.py` describes.

With R the gradient of the state after the chunk, X = V − K^g S, and X, U, S computed again from the state before it,

    dU = Pᵀ dO + K^d R        Y = (I + B A)⁻ᵀ dU        dX = B Y = dV        dβ = rowsum(Y ⊙ (X − A U))
    dA = −tril(dX Uᵀ, −1)     dP = tril(dO Uᵀ)          dK^g = −dX Sᵀ        dQ^g = dO Sᵀ        dK^d = U Rᵀ
    R ← e^(G_c) R + Q^gᵀ dO − K^gᵀ dX

and the gradients of q, k and the decays through A, P, Q^g, K^g, K^d follow by the product rule. A log-decay's is the sum over
all pairs i ≥ l > j that it stands between, added pair by pair: no difference of long sums. Derived from the forward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.delta import Call
from tarnn.kernels.eager.segments import decay_sums
from tarnn.kernels.tracing import known_finite
from tarnn.numerics import marked, set_aside


class Chunk(NamedTuple):
    """c positions of a call: g key heads, each with s states, each with r queries; s or r is 1. x is 1, or d with channels."""

    q: Tensor  # (b, g, 1, r, c, d)  normalised and scaled
    k: Tensor  # (b, g, 1, c, d)  normalised
    v: Tensor  # (b, g, s, c, e)
    beta: Tensor  # (b, g, s, c, 1)
    A: Tensor  # (b, g, 1 or s, c, c)  0 on and above the diagonal
    P: Tensor  # (b, g, 1 or s, r, c, c)  0 above the diagonal
    pair: Tensor | None  # (b, g, s, c, c, x)  e^(G_i − G_j), None without decays, as are the next two
    since: Tensor | None  # (b, g, s, c, x)  e^G
    masked: Tensor | None  # (b, 1, c, 1)

    @property
    def q_in(self) -> Tensor:
        """Q^g (b, g, 1 or s, r, c, d)"""
        return self.q if self.since is None else self.q * self.since[:, :, :, None]

    @property
    def k_in(self) -> Tensor:
        """K^g (b, g, 1 or s, c, d)"""
        return self.k if self.since is None else self.k * self.since

    @property
    def k_out(self) -> Tensor:
        """K^d (b, g, 1 or s, c, d)"""
        return self.k if self.pair is None else self.k * self.pair[..., -1, :, :]

    def kept(self, S: Tensor) -> Tensor:
        """e^(G_c) S"""
        return S if self.since is None else self.since[..., -1, :, None] * S


def normalized(x: Tensor, norm_eps: float | None) -> Tensor:
    return x if norm_eps is None else x / _norm(x, norm_eps)


def _norm(x: Tensor, norm_eps: float) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + norm_eps).sqrt()


def open_chunk(call: Call, start: int, stop: int) -> Chunk:
    """Positions start:stop of a call, copied, so that the bits of a product don't depend on where in memory they lie."""
    g, n = call.k.shape[1], call.num_states
    q, k, v, beta = (_part(x, call, start, stop) for x in (call.q, call.k, call.v, call.beta[..., None]))
    decay, masked = call.log_decay, None
    if decay is not None:
        decay = _part(decay if call.has_channels else decay[..., None], call, start, stop)
    if call.key_mask is not None:  # whatever stands there, NaN too, gets nowhere, and no time passes at it
        masked = ~call.key_mask[:, None, start:stop, None]
        k, v, beta = (x.masked_fill(masked, 0.0) for x in (k, v, beta))
        decay = None if decay is None else decay.masked_fill(masked, 0.0)
    q = call.scale * normalized(q, call.norm_eps).unflatten(1, (g, 1, -1))
    k, v, beta = normalized(k, call.norm_eps)[:, :, None], v.unflatten(1, (g, -1)), beta.unflatten(1, (g, n // g))
    if decay is None:
        A, P, pair, since = k @ k.mT, q @ k[:, :, :, None].mT, None, None
    else:
        between, since = decay_sums(decay.unflatten(1, (g, n // g)))
        pair, since = between.exp(), since.exp()
        A, P = _products(k[:, :, :, None], k, pair)[:, :, :, 0], _products(q, k, pair)
    return Chunk(q, k, v, beta, A.tril(-1), P.tril(), pair, since, masked)


def _part(x: Tensor, call: Call, start: int, stop: int) -> Tensor:
    return x[:, :, start:stop].to(call.dtype).clone(memory_format=torch.contiguous_format)


def _products(x: Tensor, k: Tensor, pair: Tensor) -> Tensor:
    """x_i·k_j, decayed, (b, g, s, r, c, c), of x (b, g, 1, r, c, d) and k (b, g, 1, c, d); anything above the diagonal."""
    if pair.shape[-1] == 1:
        return (x @ k[:, :, :, None].mT) * pair[:, :, :, None, ..., 0]
    return (x[..., :, None, :] * (pair * k[..., None, :, :])[:, :, :, None]).sum(-1)


def solve(chunk: Chunk, S: Tensor) -> Tensor:
    """U (b, g, s, c, e): what each token writes."""
    right = chunk.beta * (chunk.v - chunk.k_in @ S)
    return torch.linalg.solve_triangular(chunk.beta * chunk.A, right, upper=False, unitriangular=True)


def forward(chunk: Chunk, S: Tensor) -> tuple[Tensor, Tensor]:
    """O (b, g, s, r, c, e), and the state after the chunk."""
    U = solve(chunk, S)
    clean, spoilt = (U, None) if known_finite(U) else set_aside(U)
    out = chunk.q_in @ S[:, :, :, None] + chunk.P @ clean[:, :, :, None]
    if spoilt is not None:  # in each output from there on, and in none before: 0·NaN is NaN
        out = marked(out, (spoilt.cumsum(-1) > 0)[:, :, :, None].expand(out.shape[:-1]))
    return out, behind(chunk, S, U)


def behind(chunk: Chunk, S: Tensor, U: Tensor) -> Tensor:
    return chunk.kept(S) + chunk.k_out.mT @ U


def backward(chunk: Chunk, S: Tensor, grad_o: Tensor, R: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The gradients of q, k, v, β and log-decay as `Chunk` has them, by name, and the gradient of the state before the chunk.

    S: the state before it. grad_o (b, g, s, r, c, e). R: the gradient of the state after it.
    """
    X, U = chunk.v - chunk.k_in @ S, solve(chunk, S)
    q_in, k_in, k_out = chunk.q_in, chunk.k_in, chunk.k_out
    grad_U = (chunk.P.mT @ grad_o).sum(3) + k_out @ R
    Y = torch.linalg.solve_triangular((chunk.beta * chunk.A).mT, grad_U, upper=True, unitriangular=True)
    grad_X = chunk.beta * Y
    grad_beta = (Y * (X - chunk.A @ U)).sum(-1, keepdim=True)
    grad_A, grad_P = -(grad_X @ U.mT).tril(-1), (grad_o @ U[:, :, :, None].mT).tril()
    grad_k_in, grad_q_in, grad_k_out = -grad_X @ S.mT, grad_o @ S[:, :, :, None].mT, U @ R.mT
    before = chunk.kept(R) + (q_in.mT @ grad_o).sum(3) - k_in.mT @ grad_X
    if chunk.pair is None or chunk.since is None:
        grad_q = grad_q_in + grad_P @ chunk.k[:, :, :, None]
        grad_k = grad_k_in + grad_k_out + (grad_A + grad_A.mT) @ chunk.k + (grad_P.mT @ chunk.q).sum(3)
        grad_decay = None
    else:
        by_row_q, by_row_k, by_column, of_pairs = _through_pairs(chunk, grad_A, grad_P)
        since = chunk.since
        grad_q = by_row_q + grad_q_in * since[:, :, :, None]
        grad_k = by_row_k + by_column + grad_k_in * since + grad_k_out * chunk.pair[..., -1, :, :]
        of_since = (grad_q_in * q_in).sum(3) + grad_k_in * k_in  # of the logarithms, (b, g, s, c, d)
        of_end = (R * chunk.kept(S)).sum(-1)  # (b, g, s, d)
        of_out = grad_k_out * k_out
        if since.shape[-1] == 1:
            of_since, of_end, of_out = (x.sum(-1, keepdim=True) for x in (of_since, of_end, of_out))
        grad_decay = _of_decays(of_pairs, of_since, of_end, of_out)
    return {"q": grad_q.sum(2), "k": grad_k.sum(2), "v": grad_X, "beta": grad_beta, "log_decay": grad_decay}, before


def _through_pairs(chunk: Chunk, grad_A: Tensor, grad_P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Send gradients of A and P to q, to k as a row, to k as a column, and to the logarithm of each pair (b, g, s, c, c, x)."""
    q, k, pair = chunk.q, chunk.k, chunk.pair
    assert pair is not None
    if pair.shape[-1] == 1:
        A, P = grad_A * pair[..., 0], grad_P * pair[:, :, :, None, ..., 0]
        of_pairs = (grad_A * chunk.A + (grad_P * chunk.P).sum(3))[..., None]
        return P @ k[:, :, :, None], A @ k, A.mT @ k + (P.mT @ q).sum(3), of_pairs
    keys = pair * k[..., None, :, :]  # (b, g, s, c, c, d)
    rows = grad_A[..., None] * k[..., :, None, :] + (grad_P[..., None] * q[..., :, None, :]).sum(3)
    by_row_q = (grad_P[..., None] * keys[:, :, :, None]).sum(-2)
    return by_row_q, (grad_A[..., None] * keys).sum(-2), (rows * pair).sum(-3), rows * keys


def _of_decays(of_pairs: Tensor, of_since: Tensor, of_end: Tensor, of_out: Tensor) -> Tensor:
    """The gradient of each log-decay (b, g, s, c, x): of all that it is a term of.

    of_pairs (…, c, c, x): of G_i − G_j; of_since (…, c, x): of G_i; of_end (…, x): of G_c before S; of_out (…, c, x): of
    G_c − G_j.
    """
    c = of_since.shape[-2]
    last = torch.zeros(c, dtype=of_since.dtype, device=of_since.device)
    last[-1] = 1
    of_pairs = of_pairs + last[:, None, None] * of_out[..., None, :, :]
    of_since = of_since + last[:, None] * of_end[..., None, :]
    earlier = torch.ones(c, c, dtype=torch.bool, device=of_since.device).tril(-1)[..., None]  # row l, column j: j < l
    from_row = of_pairs.flip(-3).cumsum(-3).flip(-3)  # (…, l, j, x): over i ≥ l
    return from_row.masked_fill(~earlier, 0.0).sum(-2) + of_since.flip(-2).cumsum(-2).flip(-2)


def of_inputs(call: Call, start: int, stop: int, chunk: Chunk, gradients: dict[str, Any]) -> dict[str, Any]:
    """The gradients of the call's own tensors at positions start:stop, from those of the chunk."""
    q, k = _part(call.q, call, start, stop), _part(call.k, call, start, stop)
    k = k if chunk.masked is None else k.masked_fill(chunk.masked, 0.0)
    found = {
        "q": _through_norm(q, call.scale * gradients["q"].flatten(1, 2), call.norm_eps),
        "k": _through_norm(k, gradients["k"], call.norm_eps),
        "v": gradients["v"].flatten(1, 2),
        "beta": gradients["beta"].flatten(1, 2),
    }
    if gradients["log_decay"] is not None:
        found["log_decay"] = gradients["log_decay"].flatten(1, 2)
    if chunk.masked is not None:
        found |= {name: x.masked_fill(chunk.masked, 0.0) for name, x in found.items() if name != "q"}
    found["beta"] = found["beta"][..., 0]
    if "log_decay" in found and not call.has_channels:
        found["log_decay"] = found["log_decay"][..., 0]
    return found


def _through_norm(x: Tensor, grad: Tensor, norm_eps: float | None) -> Tensor:
    """The gradient of x from that of x/√(Σx² + ε), exact with ε."""
    if norm_eps is None:
        return grad
    norm = _norm(x, norm_eps)
    unit = x / norm
    return (grad - unit * (unit * grad).sum(-1, keepdim=True)) / norm
