"""The delta rule by the compiled kernels (csrc/delta): forward, backward, and one token.

The kernels take any strides and any floating type that `arguments.py` names, so nothing is copied here but small things: β and
decays become the wide type, states contiguous. How the kernels work: docs/kernels.md.
"""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import arguments, recurrent
from tarnn.kernels.delta import Call, Gradients, Outputs


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return arguments.refusal(call.q)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrent.forward(call, _run, recurrent.new_kept(call) if for_backward else None, with_state)


def backward(call: Call, returned: Any) -> Gradients:
    return recurrent.backward(call, returned, _run, torch.ops.tarnn_cpu.delta_backward.default, _inputs(call))


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrent.step(call, _run_step, inplace)


def _run(call: Call, *written: Tensor | None) -> None:
    torch.ops.tarnn_cpu.delta_forward.default(*_inputs(call), *written)


def _run_step(call: Call, *written: Tensor | None) -> None:
    torch.ops.tarnn_cpu.delta_step.default(*_inputs(call), *written)


def _inputs(call: Call) -> tuple:
    """The call in the order of the kernels' arguments."""
    q, k, v, beta, decay, S, key_mask, _, scale, norm_eps = call
    beta, decay = beta.to(call.dtype), None if decay is None else decay.to(call.dtype)
    S, bounds = arguments.in_a_row(S, call.dtype), arguments.bounds(call)
    norm = (norm_eps is not None, norm_eps or 0.0)
    return q, k, v, beta, decay, S, key_mask, bounds, scale, *norm, recurrent.DELTA_SEGMENT
