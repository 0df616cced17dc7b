"""From the arguments of the delta rule to the record that backends take: cast and checked."""

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from tarnn.kernels.delta import Call
from tarnn.kernels.plain import is_plain
from tarnn.numerics import autocast, wide
from tarnn.ops.checks import check_key_mask, check_packing, check_tensors, shapes
from tarnn.ops.delta.state import DeltaState

NORM_EPS = 1e-6


def make_call(
    q, k, v, beta, log_decay, normalize_qk, scale, key_mask=None, cu_seqlens=None, state: DeltaState | None = None
) -> Call:
    """β and log_decay come in the wide dtype, a decay of each head for each token. Raises ValueError and TypeError for
    arguments that don't fit each other, and where looking at numbers costs little for β and decays out of range."""
    looks = None
    if key_mask is None and cu_seqlens is None:
        looks = _looks(q, k, v, beta, log_decay, normalize_qk, scale, state)
    numbers = None if looks is None else _FINE.get(looks)
    if numbers is None:
        call = _checked(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state)
        if looks is not None and call.beta is beta and call.log_decay is log_decay:
            if len(_FINE) >= _MOST_FINE:
                _FINE.clear()
            _FINE[looks] = call[-2:]
    else:
        call = Call(q, k, v, beta, log_decay, None if state is None else state.S, None, None, *numbers)
    if is_plain(q):
        _check_numbers(call)
    return call


_MOST_FINE = 1000
_FINE: dict[Hashable, tuple] = {}  # plain calls that have passed all checks: what those look at → the call's constants


def _looks(q, k, v, beta, log_decay, normalize_qk, scale, state) -> Hashable:
    """All that decides whether a plain call on a CPU is fine, so that checks of the next such call cost a look-up; else None."""
    if not is_plain(q) or torch._C._is_any_autocast_enabled():
        return None
    looks: list = [type(normalize_qk), normalize_qk, type(scale), scale]
    for x in (q, k, v, beta, log_decay, None if state is None else getattr(state, "S", state)):
        if x is None:
            looks.append(None)
        elif isinstance(x, Tensor) and x.is_cpu:
            looks += (x.shape, x.dtype)
        else:
            return None
    return tuple(looks) if state is None or type(state) is DeltaState else None


def _checked(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state) -> Call:
    check_tensors(q=q, k=k, v=v, beta=beta, log_decay=log_decay, key_mask=key_mask, cu_seqlens=cu_seqlens)
    q, k, v = autocast(q, k, v)
    _check_shapes(q, k, v)
    (b, _, t, d), n, sums = q.shape, max(k.shape[1], v.shape[1]), wide(q.dtype)
    if key_mask is not None:
        check_key_mask(key_mask, b, t)
    if cu_seqlens is not None:
        check_packing(cu_seqlens, b, t, t)
    if beta.shape != (b, n, t):
        raise ValueError(
            f"beta must be (b, n, t) = {(b, n, t)}, one per state and token, n the larger of the key and value heads; "
            f"got {tuple(beta.shape)}."
        )
    _check_floating("beta", beta, q)
    if log_decay is not None:
        if log_decay.shape not in ((n,), (b, n, t), (b, n, t, d)):
            raise ValueError(
                f"log_decay must be (n,) = {(n,)}, (b, n, t) = {(b, n, t)} or (b, n, t, d) = {(b, n, t, d)}, n the larger of "
                f"the key and value heads; got {tuple(log_decay.shape)}."
            )
        _check_floating("log_decay", log_decay, q)
        log_decay = log_decay.to(sums)
        log_decay = log_decay[None, :, None].expand(b, n, t) if log_decay.ndim == 1 else log_decay
    if scale is None:
        scale = d**-0.5
    elif not _is_number(scale):
        raise ValueError(f"scale must be a finite number, or None for 1/√d; got {scale!r}.")
    norm_eps = _norm_eps(normalize_qk)
    call = Call(q, k, v, beta.to(sums), log_decay, None, key_mask, cu_seqlens, float(scale), norm_eps)
    return call if state is None else call._replace(S=_checked_state(state, call))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"the delta rule takes q (b, h, t, d), k (b, g, t, d), v (b, m, t, e): four axes each; got {shapes(q=q, k=k, v=v)}. "
            "A projection's (b, t, h·d) output becomes (b, h, t, d) by .unflatten(-1, (h, d)).transpose(1, 2)."
        )
    (b, h, t, d), g, m = q.shape, k.shape[1], v.shape[1]
    if k.shape != (b, g, t, d) or v.shape[0] != b or v.shape[2] != t or d == 0:
        raise ValueError(
            "q (b, h, t, d), k (b, g, t, d) and v (b, m, t, e) must share b and t, and q and k also d, which is 1 at least; "
            f"got {shapes(q=q, k=k, v=v)}. For a continued sequence pass state=."
        )
    values_in_groups, queries_in_groups = g == h and g and m % g == 0, g == m and g and h % g == 0
    if not (values_in_groups or queries_in_groups) or m == 0 or h == 0:
        raise ValueError(
            "heads must divide: as many keys as queries and a multiple of that of values, or as many keys as values and a "
            f"multiple of that of queries; got h = {h}, g = {g}, m = {m} ({shapes(q=q, k=k, v=v)})."
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}. Cast them first."
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}.")


def _check_floating(name: str, x: Tensor, q: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating; got {x.dtype}. Pass {name}.float().")
    if x.device != q.device:
        raise ValueError(f"{name} must be where q is, on {q.device}; got {x.device}.")


def _check_numbers(call: Call) -> None:
    """Raises ValueError for a β or a log-decay out of range, where looking costs little: of tensors with data on a CPU."""
    beta, decay = (x if x is None or not x.requires_grad else x.detach() for x in (call.beta, call.log_decay))
    if beta is not None and beta.is_cpu and beta.numel() and is_plain(beta):
        least, most = (x.item() for x in beta.aminmax())
        if not (least >= 0 and most <= 2) and _outside(beta, 0.0, 2.0, call.key_mask):
            raise ValueError(
                f"beta must be from 0 to 2; got {least:.3g} to {most:.3g}. Pass σ(logits), or 2·σ(logits), not the logits: "
                "beyond 2 a key that repeats makes the state grow without bound."
            )
    if decay is not None and decay.is_cpu and decay.numel() and is_plain(decay):
        most = decay.max().item()
        if not most <= 0 and _outside(decay, -torch.inf, 0.0, call.key_mask):
            raise ValueError(
                f"log_decay must be ≤ 0: states fade, never grow; got {most:.3g}. Pass the logarithm of a factor."
            )


def _outside(x: Tensor, least: float, most: float, key_mask: Tensor | None) -> bool:
    """Whether some number of x (b, n, t, …) that is used is below or above; NaN is neither."""
    wrong = (x < least) | (x > most)
    if key_mask is not None:
        wrong = wrong & key_mask[:, None, :].reshape(x.shape[0], 1, -1, *[1] * (x.ndim - 3))
    return bool(wrong.any())


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _norm_eps(normalize_qk) -> float | None:
    if isinstance(normalize_qk, bool):
        return NORM_EPS if normalize_qk else None
    if not _is_number(normalize_qk) or normalize_qk <= 0:
        raise ValueError(
            "normalize_qk must be False, True for √(Σx² + 1e-6), or the number above 0 that takes the place of 1e-6; "
            f"got {normalize_qk!r}."
        )
    return float(normalize_qk)


def _checked_state(state: DeltaState, call: Call) -> Tensor:
    if not isinstance(state, DeltaState):
        raise TypeError(f"state must be a DeltaState, which delta_rule returns; got {type(state).__name__}.")
    S, expected = state.S, (call.num_sequences, call.num_states, call.k.shape[3], call.v.shape[3])
    if S.shape != expected or S.dtype != call.dtype or S.device != call.q.device:
        raise ValueError(
            f"the state's S must be {expected} in {call.dtype} on {call.q.device}; got {tuple(S.shape)} in {S.dtype} on "
            f"{S.device}. A state fits the model, the number of sequences and the precision that made it."
        )
    return S
