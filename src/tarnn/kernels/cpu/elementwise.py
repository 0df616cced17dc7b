"""RMSNorm and SwiGLU's product by the compiled kernels (csrc/elementwise): one pass where plain PyTorch makes many.

Inputs that are not contiguous are copied; sums over rows give the same bits on any number of threads. Sixteen bits are computed
in float32 and rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import arguments, library
from tarnn.kernels.elementwise import Call, Gradients, Outputs
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import wide


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    x, y, z = call[:3]
    if not is_untraced(y):  # of x that is known: what traces it sees eager's operations
        return "A traced call is computed in plain PyTorch."
    if not x.is_cpu or not arguments.takes(x.dtype):
        return "The compiled elementwise kernels take float32, bfloat16 and float16 on a CPU."
    norm = call.function == "rms_norm"
    if y.dtype not in ((x.dtype, wide(x.dtype)) if norm else (x.dtype,)) or (z is not None and z.dtype != x.dtype):
        return "The compiled elementwise kernels take tensors alike, and a weight in float32."
    if y.shape != (x.shape[-1:] if norm else x.shape) or (z is not None and z.shape != x.shape):
        return "These shapes don't fit each other; PyTorch's own operations broadcast them or say why not."
    return library.refusal()


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    x, y, z = _inputs(call)
    o = torch.empty_like(x)
    if call.function == "swiglu":
        torch.ops.tarnn_cpu.swiglu.default(x, y, o)
        return Outputs(o)
    scale, eps = x.new_empty(x.shape[:-1], dtype=y.dtype), call.eps
    torch.ops.tarnn_cpu.rms_norm.default(x, y, z, torch.finfo(x.dtype).eps if eps is None else eps, o, scale)
    return Outputs(o, scale)


def backward(call: Call, returned: Any) -> Gradients:
    x, y, z = _inputs(call)
    grads = Gradients(torch.empty_like(x), torch.empty_like(y), None if z is None else torch.empty_like(z))
    grad_o = returned.grad_o.contiguous()
    if call.function == "swiglu":
        torch.ops.tarnn_cpu.swiglu_backward.default(grad_o, x, y, *grads[:2])
        return grads
    torch.ops.tarnn_cpu.rms_norm_backward.default(grad_o, x, y, z, returned.scale, *grads)
    return grads._replace(y=grads.y.to(call.y.dtype))


def _inputs(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors as the kernels read them."""
    x, y, z = call[:3]
    y = y.to(wide(x.dtype)) if call.function == "rms_norm" else y
    return x.contiguous(), y.contiguous(), None if z is None else z.contiguous()
