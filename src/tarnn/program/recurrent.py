"""The definition of the instructions that remember: token by token, as the docstrings of `recording` state them.

Each is a function of a `Call`, the states of one row and its inputs (t, heads, width), to outputs and new states.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tarnn.numerics import default_eps
from tarnn.program.hybrid_definition import hybrid
from tarnn.program.row_wise import FUNCTIONS, Call, Outputs, of_heads

RowState = tuple[Tensor, ...]  # the tensors of one row, in the order of Program.states
Recurrent = Callable[..., tuple[Outputs, RowState]]


def mix(call: Call, states: RowState, x: Tensor) -> tuple[Outputs, RowState]:
    x = torch.cat([states[0][None], x.flatten(1)])
    before, now = x[:-1], x[1:]
    return tuple(now + (before - now) * mu for mu in call.weights("mixtures")[0]), (x[-1],)


def filter(call: Call, states: RowState, x: Tensor) -> tuple[Outputs, RowState]:
    (taps,), bias = call.weights("taps"), call.weight("bias")
    seen, width = torch.cat([states[0], x.flatten(1)]), taps.shape[1]
    sums = [(seen[i : i + width] * taps.mT).sum(0) for i in range(len(x))]
    y = torch.stack(sums) if sums else x.flatten(1)
    y = FUNCTIONS[str(call.instruction.numbers["function"])](y if bias is None else y + bias)
    return (y,), (seen[len(x) :],)


def softmax(call: Call, states: RowState, q: Tensor, *kv: Tensor) -> tuple[Outputs, RowState]:
    past, shared, e = states[0].shape[1], q.shape[1] // kv[0].shape[1], call.instruction.outputs[0].width
    kept = tuple(torch.cat([old, new.movedim(0, 1)], 1) for old, new in zip(states, kv, strict=True))  # (g, s, ·)
    k, v = kept[0], kept[-1][..., :e]  # without v: channels of k
    outputs = [q.new_zeros(0, q.shape[1], e)]
    for i, query in enumerate(q.unflatten(1, (-1, shared))):  # (g, r, d)
        seen = past + i + 1
        weights = (call.number("scale") * query @ k[:, :seen].mT).softmax(-1)
        outputs.append((weights @ v[:, :seen]).flatten(0, 1)[None])
    return (torch.cat(outputs),), kept


def linear(call: Call, states: RowState, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Outputs, RowState]:
    S, z, M = (*states, None, None)[:3]
    assert S is not None
    n, out_heads, t = len(S), call.instruction.outputs[0].heads, len(q)
    log_decay, w, u = (call.option(name, more) for name in ("decay", "k_scale", "q_scale"))
    d, zq, zk = (
        decays(call, log_decay, t, n),
        call.option("denominator", more, q),
        call.option("denominator", more[1:], k),
    )
    outputs = [q.new_zeros(0, out_heads, v.shape[2])]
    for i in range(t):
        keep, enter, unit = d[i], q.new_zeros(n, 1), q.new_zeros(n)
        if M is not None and w is not None:  # S and z are in units of e^M, M the largest weight so far
            weight, before = of_heads(w[i, :, 0], n), M
            M = torch.maximum(before + d[i].amax(-1), weight)
            unit = torch.where(M == -torch.inf, 0.0, M)
            keep, enter = d[i] + (before - unit)[:, None], (weight - unit)[:, None]
        keep, enter = keep.exp(), enter.exp()
        S = keep[..., None] * S + (enter * of_heads(k[i], n))[..., None] * of_heads(v[i], n)[:, None]
        z = None if z is None else keep * z + enter * of_heads(zk[i], n)
        o = read_states(of_heads(q[i], out_heads), S)
        if z is not None and call.instruction.numbers["normalize"]:
            den, eps = read_states(of_heads(zq[i], out_heads), z[..., None]), call.number("eps") or default_eps(q.dtype)
            if call.number("at_least_one"):
                o = o / (den.abs().maximum(of_heads((-unit).exp()[:, None], out_heads)) + eps)
            else:
                o = torch.where(den == 0, 0.0, o / torch.where(den == 0, 1.0, den + eps))
        else:
            o = o * of_heads(unit[:, None], out_heads).exp() * (1.0 if u is None else of_heads(u[i], out_heads).exp())
        outputs.append(o[None])
    return (torch.cat(outputs),), tuple(x for x in (S, z, M) if x is not None)


def read_states(q: Tensor, S: Tensor) -> Tensor:
    """Compute Sᵀq of each query (heads, f), neighbours of which share a state of S (n, f, e)."""
    return torch.einsum("nrf,nfe->nre", q.unflatten(0, (len(S), -1)), S).flatten(0, 1)


def decays(call: Call, register: Tensor | None, length: int, n: int) -> Tensor:
    """Return the log-decay of each token and state, (t, n, 1 or f)."""
    weight = call.weight("log_decay")
    if register is not None:
        return register
    if weight is not None:
        return weight[None, :, None].expand(length, n, 1)
    return torch.zeros(length, n, 1, dtype=call.tokens.dtype, device=call.tokens.ids.device)


def delta(call: Call, states: RowState, q, k, v, beta, *log_decay: Tensor) -> tuple[Outputs, RowState]:
    (S,), n, out_heads = states, len(states[0]), call.instruction.outputs[0].heads
    d = decays(call, log_decay[0] if log_decay else None, len(q), n)
    outputs = [q.new_zeros(0, out_heads, v.shape[2])]
    for i in range(len(q)):
        S, key = d[i].exp()[..., None] * S, of_heads(k[i], n)
        error = of_heads(v[i], n) - read_states(key, S)
        S = S + (beta[i].reshape(n, 1) * key)[..., None] * error[:, None]
        outputs.append(read_states(of_heads(q[i], out_heads), S)[None])
    return (torch.cat(outputs),), (S,)


def low_rank_delta(call: Call, states: RowState, r, log_decay, k, v, a, b) -> tuple[Outputs, RowState]:
    (S,), outputs = states, [torch.zeros_like(v[:0])]
    for i in range(len(r)):
        answer = read_states(a[i], S)  # of the state before it decays
        S = log_decay[i].exp()[..., None] * S + b[i][..., None] * answer[:, None] + k[i][..., None] * v[i][:, None]
        outputs.append(read_states(r[i], S)[None])
    return (torch.cat(outputs),), (S,)


def selective_scan(call: Call, states: RowState, u, dt, B, C) -> tuple[Outputs, RowState]:
    (h,), outputs = states, [torch.zeros_like(u[:0])]
    rates, n = call.weights("A")[0].mT.unflatten(1, u.shape[1:]), len(h)  # (n, heads, width)
    h = h.unflatten(1, u.shape[1:])
    for i in range(len(u)):
        h = (dt[i] * rates).exp() * h + dt[i] * u[i] * B[i].mT[..., None]
        outputs.append((h * C[i].mT[..., None]).sum(0)[None])
    return (torch.cat(outputs),), (h.reshape(n, -1),)


def diagonal_scan(call: Call, states: RowState, x, log_decay) -> tuple[Outputs, RowState]:
    (h,), keep, outputs = states, log_decay.flatten(1).exp(), [torch.zeros_like(x[:0])]
    if call.instruction.numbers["normalize"]:
        factor = (1 - keep.square()).sqrt()
        factor[call.tokens.positions == 0] = 1
        x = x * factor.view_as(x)
    for i in range(len(x)):
        h = keep[i] * h + x[i].flatten()
        outputs.append(h.view_as(x[:1]))
    return (torch.cat(outputs),), (h,)


RECURRENT: dict[str, Recurrent] = {
    f.__name__: f for f in (mix, filter, softmax, linear, delta, low_rank_delta, hybrid, selective_scan, diagonal_scan)
}
