"""RMSNorm and SwiGLU's product by the compiled kernels (csrc/elementwise): one pass where plain PyTorch makes many.

Inputs are contiguous but for gradients, which are made so; sums over rows give the same bits on any number of threads.
"""

import torch
from torch import Tensor

from tarnn.kernels.cpu import library
from tarnn.kernels.plain import is_plain

_DTYPES = (torch.float32, torch.float64)


def supports(x: Tensor, y: Tensor) -> bool:
    """Whether the kernels are there for these inputs: contiguous, of one dtype, on a CPU, and nothing traces the call."""
    if not (is_plain(x) and is_plain(y)) or not x.is_cpu or x.dtype not in _DTYPES or y.dtype != x.dtype:
        return False
    return x.is_contiguous() and y.is_contiguous() and library.available()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y (…, n), what each row was multiplied with (…))."""
    y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
    torch.ops.tarnn_cpu.rms_norm.default(x, weight, eps, y, scale)
    return y, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    grads = torch.empty_like(x), torch.empty_like(weight)
    torch.ops.tarnn_cpu.rms_norm_backward.default(grad.contiguous(), x, weight, scale, *grads)
    return grads


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ⊙ up."""
    y = torch.empty_like(gate)
    torch.ops.tarnn_cpu.swiglu.default(gate, up, y)
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    torch.ops.tarnn_cpu.swiglu_backward.default(grad.contiguous(), gate, up, *grads)
    return grads
