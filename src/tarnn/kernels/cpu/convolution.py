"""Short convolution by the compiled kernels (csrc/convolution): forward, backward, and one token.

They take any strides: tokens pass through small tiles, which are loaded and stored as tensors lie.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.convolution import Call, Gradients, Outputs
from tarnn.kernels.cpu import arguments


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return arguments.refusal(call.x)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    outputs = Outputs(_new(call), call.new_state() if with_state else None)
    torch.ops.tarnn_cpu.convolution_forward.default(*_inputs(call), outputs.o, outputs.S if call.causal else None)
    return outputs


def backward(call: Call, returned: Any) -> Gradients:
    x, weight, bias, S, *_ = call
    grads = Gradients(
        _new(call),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
        None if bias is None else torch.empty_like(bias),
        None if S is None else S.new_empty(S.shape),
    )
    grad_o = torch.zeros_like(x) if returned.grad_o is None else returned.grad_o
    grad_S = returned.grad_S if call.causal else None
    torch.ops.tarnn_cpu.convolution_backward.default(grad_o, grad_S, *_inputs(call), *grads)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token for every row; autograd is told of the state that is written in place."""
    S: Any = call.S
    outputs = Outputs(call.x.new_empty(call.x.shape), S if inplace else S.new_empty(S.shape))
    torch.ops.tarnn_cpu.convolution_step.default(*_inputs(call), *outputs)
    if inplace:
        increment_version(S)
    return outputs


def _new(call: Call) -> Tensor:
    """To write what is like x into; at masked tokens nobody writes."""
    make = call.x.new_empty if call.key_mask is None else call.x.new_zeros
    return make(call.x.shape)


def _inputs(call: Call) -> tuple:
    """The call as the kernels read it."""
    x, weight, bias, S, key_mask, _, _, silu = call
    return (
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        S,
        key_mask,
        arguments.bounds(call),
        call.before,
        silu,
    )
