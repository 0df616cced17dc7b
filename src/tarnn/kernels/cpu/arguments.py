"""Arguments of all compiled kernels: which tensors they take, and how they take small ones."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refusal(x: Tensor) -> str | None:
    """Why the compiled kernels can't compute a call whose first tensor is x, or None."""
    if not x.is_cpu:
        return "The compiled kernels are for CPUs, and these tensors are elsewhere."
    if x.dtype not in DTYPES:
        return f"The compiled kernels take float32, bfloat16, float16 and float64; got {x.dtype}."
    return library.refusal()


def in_a_row(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x contiguous and of this type, itself where it is."""
    if x is None or (x.dtype == dtype and x.is_contiguous()):  # looked at first: each call of torch is a part of a step
        return x
    return x.to(dtype).contiguous()


def bounds(call: Any) -> Tensor | None:
    """Where packed sequences begin and end, int64; None where nothing is packed."""
    cuts = call.cuts()
    return None if cuts is None else torch.tensor(cuts, dtype=torch.int64, device="cpu")
