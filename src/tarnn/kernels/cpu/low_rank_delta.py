"""The delta rule of low rank by the compiled kernels (csrc/delta/low_rank.h): forward, backward, and one token.

The kernels take any strides and any of the four floating types, so nothing is copied here but small things: decays become the
wide type, states contiguous. How the kernels work: docs/kernels.md.
"""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import arguments, delta_passes
from tarnn.kernels.low_rank_delta import Call, Gradients, Outputs


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return arguments.refusal(call.q)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return delta_passes.forward(call, _run, for_backward, with_state)


def backward(call: Call, returned: Any) -> Gradients:
    return delta_passes.backward(call, returned, _run, _run_backward)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return Outputs(*delta_passes.step(call, _run, inplace))


def _run(call: Call, o: Tensor, S: Tensor | None, kept: Tensor | None = None) -> None:
    torch.ops.tarnn_cpu.low_rank_forward.default(*_inputs(call), o, S, kept)


def _run_backward(call: Call, grad_o: Any, grad_S: Any, kept: Tensor | None, grads: Gradients) -> None:
    torch.ops.tarnn_cpu.low_rank_backward.default(grad_o, grad_S, kept, *_inputs(call), *grads)


def _inputs(call: Call) -> tuple:
    """The call in the order of the kernels' arguments."""
    q, k, v, a, b, decay, S, key_mask, _, scale = call
    dtype = call.dtype
    return (
        q,
        k,
        v,
        a,
        b,
        None if decay is None else decay.to(dtype),
        arguments.in_a_row(S, dtype),
        key_mask,
        arguments.bounds(call),
        scale,
        delta_passes.SEGMENT,
    )
