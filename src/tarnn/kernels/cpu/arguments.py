"""Arguments of all compiled kernels: which tensors they take, and how they take small ones."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(dtype: torch.dtype) -> bool:
    """Return whether the compiled kernels compute in this type: in float64, which is exact in plain PyTorch, for tests alone."""
    return dtype in DTYPES or (dtype == torch.float64 and library.computes_float64())


def refusal(x: Tensor) -> str | None:
    """Return why the compiled kernels can't compute a call whose first tensor is x, or None."""
    if not x.is_cpu:
        return "The compiled kernels are for CPUs, and these tensors are elsewhere."
    if not takes(x.dtype):
        return f"The compiled kernels take float32, bfloat16 and float16; got {x.dtype}."
    return library.refusal()


def in_a_row(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Make x contiguous and of this type; it is itself where it is both already."""
    if x is None or (x.dtype == dtype and x.is_contiguous()):  # looked at first: each call of torch is a part of a step
        return x
    return x.to(dtype).contiguous()


def bounds(call: Any) -> Tensor | None:
    """Return where packed sequences begin and end, int64; None where nothing is packed."""
    cuts = call.cuts()
    return None if cuts is None else torch.tensor(cuts, dtype=torch.int64, device="cpu")
