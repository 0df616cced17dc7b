"""RMSNorm and SwiGLU's product by the compiled kernels (csrc/elementwise): one pass where plain PyTorch makes many.

Inputs are contiguous but for gradients, which are made so; sums over rows give the same bits on any number of threads.
"""

from typing import Any

import torch

from tarnn.kernels.cpu import arguments, library
from tarnn.kernels.elementwise import Call, Gradients, Outputs
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import wide


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    x, y = call.x, call.y
    if not is_untraced(y):  # of x that is known: what traces it sees eager's operations
        return "A traced call is computed in plain PyTorch."
    if not x.is_cpu or x.dtype != wide(x.dtype) or not arguments.takes(x.dtype) or y.dtype != x.dtype:
        return "The compiled elementwise kernels take float32 on a CPU, both tensors alike."
    if not (x.is_contiguous() and y.is_contiguous()):
        return "The compiled elementwise kernels take contiguous tensors."
    if y.shape != (x.shape[-1:] if call.function == "rms_norm" else x.shape):
        return "These shapes don't fit each other; PyTorch's own operations broadcast them or say why not."
    return library.refusal()


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    x, y, function, eps = call
    o = torch.empty_like(x)
    if function == "swiglu":
        torch.ops.tarnn_cpu.swiglu.default(x, y, o)
        return Outputs(o)
    scale = x.new_empty(x.shape[:-1])
    torch.ops.tarnn_cpu.rms_norm.default(x, y, torch.finfo(x.dtype).eps if eps is None else eps, o, scale)
    return Outputs(o, scale)


def backward(call: Call, returned: Any) -> Gradients:
    grads = Gradients(torch.empty_like(call.x), torch.empty_like(call.y))
    grad_o = returned.grad_o.contiguous()
    if call.function == "swiglu":
        torch.ops.tarnn_cpu.swiglu_backward.default(grad_o, call.x, call.y, *grads)
    else:
        torch.ops.tarnn_cpu.rms_norm_backward.default(grad_o, call.x, call.y, returned.scale, *grads)
    return grads
