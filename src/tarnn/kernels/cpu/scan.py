"""What the compiled kernels of both scans (csrc/scan) take and give: states, kept states, types."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu import arguments

# tokens: forward keeps the state before each such segment but the first; backward computes the others from these
KEPT_EVERY = 64


def refusal(call: Any) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    if call.x.numel() == 0 or 0 in call.state_shape:
        return "Tensors without numbers are left to plain PyTorch."
    return arguments.refusal(call.x)


def new_kept(call: Any) -> Tensor:
    """For the states before all segments but the first, sequence after sequence."""
    cuts = call.cuts()
    lengths = [call.x.shape[1]] * call.x.shape[0] if cuts is None else [b - a for a, b in zip(cuts, cuts[1:])]
    count = sum(max(0, length - 1) // KEPT_EVERY for length in lengths)
    return call.x.new_empty(count, *call.state_shape[1:], dtype=call.dtype)


def inputs(call: Any) -> tuple:
    """What both scans begin with."""
    before = None if call.h is None else call.h.contiguous()
    return (
        call.x,
        before,
        None if call.key_mask is None else call.key_mask.contiguous(),
        arguments.bounds(call),
        KEPT_EVERY,
    )


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a type that kernels read where sums are of this one: itself, but for float64 among float32 and the contrary."""
    sixteen_bits = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    return x if x.dtype == dtype or sixteen_bits else x.to(dtype)


def step(call: Any, run: Any, inplace: bool) -> tuple[Tensor, Tensor]:
    """o and the state behind one token, by run(call, o, behind), which may write the state over the one before."""
    o = call.x.new_empty(call.x.shape)
    if not inplace:
        behind = call.new_state()
        run(call, o, behind)
        return o, behind
    h = call.h.contiguous()
    run(call._replace(h=h), o, h)
    if h is not call.h:
        call.h.copy_(h)
    increment_version((call.h,))
    return o, call.h
