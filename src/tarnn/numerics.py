"""Precision: which type sums have, what autocast may cast, and how NaN and infinities are kept apart."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over inputs of this type: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast x to float32 at least; x itself if it is that wide already."""
    return x.to(wide(x.dtype))


def widest(device: torch.device | str) -> torch.dtype:
    """The widest type of a device, for angles and for sums over a whole data set: float64, on Apple's GPUs float32."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as torch's own attention casts under autocast: to its dtype, but for float64."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def full_precision(like: Tensor) -> AbstractContextManager:
    """Switch autocast off: it reaches into operators too, and their sums would no longer be float32."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def default_eps(dtype: torch.dtype) -> float:
    """The eps of a denominator, by the type of the inputs: far below any sum that is worth having, and far enough above the
    smallest normal number that a denormal one, which is flushed to 0, is lost in rounding next to it."""
    return 1e-290 if dtype == torch.float64 else 1e-30


def set_aside(x: Tensor) -> tuple[Tensor, Tensor]:
    """Replace NaN and infinities in x (…, n) by 0, and say which rows (…) had some.

    So they meet no zero of a causal mask: 0·NaN is NaN. Nothing is read on the host; it takes two passes over x."""
    with full_precision(x):
        return x.nan_to_num(0.0, 0.0, 0.0), (x.detach() @ x.new_zeros(x.shape[-1])) != 0


def marked(o: Tensor, spoiled: Tensor | None) -> Tensor:
    """Put NaN into the spoiled rows (…) of o (…, e). It is added, so that a gradient which is NaN flows on. None: no row."""
    if spoiled is None:
        return o
    return o + torch.zeros_like(spoiled, dtype=o.dtype).masked_fill(spoiled, torch.nan)[..., None]


def finite(M: Tensor) -> Tensor:
    """Replace −∞ in M by 0, so that −∞ − M is −∞ and not NaN."""
    return M.masked_fill(M == -torch.inf, 0.0)
