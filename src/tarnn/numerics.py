"""In which precision sums are kept: float32 at least, what autocast may cast and what it may not, how small is small."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in float32 at least: itself where it is in that precision already."""
    return x.to(wide(x.dtype))


def widest(device: torch.device | str) -> torch.dtype:
    """The widest numbers of a device, for angles and for sums over a whole set: float64, on Apple's GPUs float32."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast as torch's own attention casts: to its dtype, but for float64."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def full_precision(like: Tensor) -> AbstractContextManager:
    """Autocast switched off: it reaches into operators too, and their sums would no longer be float32."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def default_eps(dtype: torch.dtype) -> float:
    """Added to a denominator of sums over inputs of this dtype: far below any that is worth having, and so far above the
    smallest normal number that what is smaller, and taken for 0, is lost in rounding beside it."""
    return 1e-290 if dtype == torch.float64 else 1e-30


def set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x (…, n) with 0 for NaN and infinities, whether a row has such (…)): so that they meet no zero of a causal mask, since
    0·NaN is NaN. Nothing is read on the host: it costs two passes over x."""
    with full_precision(x):
        return x.nan_to_num(0.0, 0.0, 0.0), (x.detach() @ x.new_zeros(x.shape[-1])) != 0


def marked(o: Tensor, spoiled: Tensor | None) -> Tensor:
    """o (…, e) with NaN in the rows that are spoiled (…), None: none. (Added, so that a gradient which is NaN goes on.)"""
    if spoiled is None:
        return o
    return o + torch.zeros_like(spoiled, dtype=o.dtype).masked_fill(spoiled, torch.nan)[..., None]


def finite(M: Tensor) -> Tensor:
    """M with 0 for −∞, so that −∞ − M is −∞ and not NaN."""
    return M.masked_fill(M == -torch.inf, 0.0)
