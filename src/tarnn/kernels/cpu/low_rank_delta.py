"""The delta rule of low rank by the compiled kernels (csrc/delta/low_rank.h): forward, backward, and one token."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import arguments, recurrent
from tarnn.kernels.low_rank_delta import Call, Gradients, Outputs


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return arguments.refusal(call.q)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrent.forward(call, _run, recurrent.new_kept(call) if for_backward else None, with_state)


def backward(call: Call, returned: Any) -> Gradients:
    return recurrent.backward(call, returned, _run, torch.ops.tarnn_cpu.low_rank_backward.default, _inputs(call))


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrent.step(call, _run, inplace)


def _run(call: Call, o: Tensor, after: Tensor | None, kept: Tensor | None = None) -> None:
    torch.ops.tarnn_cpu.low_rank_forward.default(*_inputs(call), o, after, kept)


def _inputs(call: Call) -> tuple:
    """The call in the order of the kernels' arguments."""
    q, k, v, a, b, decay, S, key_mask, _, scale = call
    decay, S = None if decay is None else decay.to(call.dtype), arguments.in_a_row(S, call.dtype)
    return q, k, v, a, b, decay, S, key_mask, arguments.bounds(call), scale, recurrent.DELTA_SEGMENT
