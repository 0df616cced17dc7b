"""The elementwise layers between matrix products: one pass over memory each where compiled kernels take them, forward and
backward; else PyTorch's own operations, which torch.compile fuses itself."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from tarnn.kernels.cpu import elementwise as kernels


def rms_norm(x: Float[Tensor, "... n"], weight: Float[Tensor, " n"], eps: float | None) -> Float[Tensor, "... n"]:
    """x · weight / √(mean(x²) + eps), the mean over the last axis (Zhang and Sennrich 2019, eq. 4, arXiv 1910.07467).

    eps: None is the smallest number with 1 + eps > 1 in x's dtype. Kept for backward: x, and one number per row.
    """
    if weight.shape != x.shape[-1:] or not kernels.supports(x, weight):  # PyTorch's says what doesn't fit
        return functional.rms_norm(x, weight.shape, weight, eps)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)
    return kernels.rms_norm(x, weight, eps)[0]


def swiglu(gate: Float[Tensor, "... n"], up: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """silu(gate) ⊙ up, silu(a) = a / (1 + e^−a) (Shazeer 2020, arXiv 2002.05202). Kept for backward: gate and up."""
    if gate.shape != up.shape or not kernels.supports(gate, up):
        return functional.silu(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGlu.apply(gate, up)
    return kernels.swiglu(gate, up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        y, scale = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *kernels.rms_norm_backward(grad, x, weight, scale), None
        # to be differentiated itself
        scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        along = (grad * weight * x).mean(-1, keepdim=True) * scale**3
        grad_weight = (grad * x * scale)[None].flatten(0, -2).sum(0)
        return grad * weight * scale - x * along, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor):
        ctx.save_for_backward(gate, up)
        return kernels.swiglu(gate, up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return kernels.swiglu_backward(grad, gate, up)
        open_ = gate.sigmoid()
        return grad * up * open_ * (1 + gate * (1 - open_)), grad * gate * open_
