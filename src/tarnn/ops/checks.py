"""Checks of the arguments of ops: shapes, dtypes, devices. Errors say what was expected, what was given, and the remedy."""

from typing import Any

import torch
from torch import Tensor


def shapes(**tensors: Tensor | None) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items() if x is not None)


def check_attention(
    q, k, v, causal, key_mask=None, cu_seqlens=None, log_decay=None, key_log_weight=None, grouped_values=False
) -> None:
    """Raise ValueError or TypeError unless the arguments of an attention op fit each other.

    grouped_values: whether v may have more heads than q and k.
    """
    options = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "log_decay": log_decay, "key_log_weight": key_log_weight}
    check_tensors(q=q, k=k, v=v, **options)
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"attention takes q (b, h, t, d), k (b, g, s, d), v (b, g, s, e): four axes each; got {shapes(q=q, k=k, v=v)}. "
            "A projection's (b, t, h·d) output becomes (b, h, t, d) by .unflatten(-1, (h, d)).transpose(1, 2)."
        )
    (b, h, t, d), (g, s), m = q.shape, k.shape[1:3], v.shape[1]
    grouped = grouped_values and m != g
    if k.shape[0] != b or v.shape[0] != b or k.shape[3] != d or v.shape[2] != s or (m != g and not grouped):
        raise ValueError(
            f"q (b, h, t, d), k (b, g, s, d) and v (b, g, s, e) must share b, d, and k and v also g and s; "
            f"got {shapes(q=q, k=k, v=v)}."
        )
    if grouped and (h != g or g == 0 or m == 0 or m % g):
        raise ValueError(
            "where values have heads of their own, q and k must have one number of heads, and v a multiple of it; "
            f"got {shapes(q=q, k=k, v=v)}."
        )
    if g == 0 or h % g:
        raise ValueError(f"query heads must be a multiple of key/value heads; got {h} and {g} ({shapes(q=q, k=k)}).")
    if causal and t != s:
        raise ValueError(
            f"causal attention needs as many keys as queries; got {shapes(q=q, k=k)}. For a continued sequence pass state=."
        )
    check_alike(q=q, k=k, v=v)
    check_masks(key_mask, cu_seqlens, b, t, s)
    g = m  # heads of the state
    if key_log_weight is not None and key_log_weight.shape != (b, g, s):
        raise ValueError(
            f"key_log_weight must be (b, g, s) = {(b, g, s)}, one per key; got {tuple(key_log_weight.shape)}."
        )
    if log_decay is not None:
        if not causal:
            raise ValueError("log_decay needs causal=True: a decay runs along time; without causality there is none.")
        check_decay("log_decay", log_decay, v)


def check_decay(name: str, log_decay: Tensor, v: Tensor) -> None:
    """Raise ValueError unless it is a decay per head, token or channel of the keys of these values."""
    check_tensors(**{name: log_decay})
    b, g, s = v.shape[:3]
    channels = log_decay.ndim == 4 and log_decay.shape[:3] == (b, g, s)
    if log_decay.shape not in ((g,), (b, g, s)) and not channels:
        raise ValueError(
            f"{name} must be (g,) = {(g,)}, (b, g, s) = {(b, g, s)} or (b, g, s, f), g the heads of values; "
            f"got {tuple(log_decay.shape)}."
        )


def check_tensors(**given) -> None:
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}. Pass torch.tensor({name}).")


def check_alike(**inputs: Tensor) -> None:
    """Raise TypeError or ValueError unless these have one floating dtype and one device."""
    *names, last = inputs
    first, dtypes = next(iter(inputs.values())), [x.dtype for x in inputs.values()]
    if len(set(dtypes)) > 1 or not first.is_floating_point():
        raise TypeError(
            f"{', '.join(names)} and {last} must share one floating dtype; got {', '.join(map(str, dtypes))}. Cast them first."
        )
    devices = [x.device for x in inputs.values()]
    if len(set(devices)) > 1:
        raise ValueError(f"{', '.join(names)} and {last} must be on one device; got {', '.join(map(str, devices))}.")


def check_masks(key_mask: Tensor | None, cu_seqlens: Tensor | None, b: int, t: int, s: int, time: str = "s") -> None:
    """Raise unless a mask, and the bounds of packed sequences, fit t queries and s keys of b rows."""
    check_tensors(key_mask=key_mask, cu_seqlens=cu_seqlens)
    if key_mask is not None:
        check_key_mask(key_mask, b, s, time)
    if cu_seqlens is not None:
        check_packing(cu_seqlens, b, t, s)


def check_state(name: str, x: Tensor, expected: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a state's tensor is of this shape and dtype, and on this device."""
    if x.shape != expected or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"the state's {name} must be {tuple(expected)} in {dtype} on {device}; got {tuple(x.shape)} in {x.dtype} on "
            f"{x.device}. A state fits the model, the number of sequences and the precision that made it."
        )


def check_kind(state: Any, kind: type, function: str) -> None:
    """Raise TypeError unless a state is of this kind."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__}, which {function} returns; got {type(state).__name__}.")


def check_step(function: str, x: Tensor, ndim: int, kind: type, state: Any, inplace: bool) -> None:
    """Raise ValueError unless the first input, q with 4 axes or x with 3, is one token, and `inplace` has a state."""
    if x.ndim == ndim and x.shape[-2] != 1:
        expected = "q (b, h, 1, d)" if ndim == 4 else "x (b, 1, c)"
        raise ValueError(f"a step takes one token, {expected}; got {tuple(x.shape)}. For more, {function}(state=…).")
    if inplace and state is None:
        raise ValueError(
            f"a step with inplace=True needs a state to write into: make one with {kind.__name__}.zeros(…)."
        )


def check_key_mask(key_mask, b, s, time="s") -> None:
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool, True = attend; got {key_mask.dtype}. For a 0/1 mask pass mask.bool().")
    if key_mask.shape != (b, s):
        raise ValueError(f"key_mask must be (b, {time}) = {(b, s)}; got {tuple(key_mask.shape)}.")


def check_packing(cu_seqlens, b, t, s) -> None:
    if b != 1 or t != s:
        raise ValueError(
            f"cu_seqlens goes with one packed row: b = 1 and as many keys as queries; got b = {b}, t = {t}, s = {s}."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 (n + 1,); got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.")
