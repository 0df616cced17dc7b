"""Products with frozen 16-bit weights, in float32, on processors without instructions for products of 16 bits.

There torch multiplies such numbers one by one: on an AMD EPYC with AVX2 at 1 GFLOP/s where the weight is not transposed, as in
backward, and at 15 where it is. Float32 products reach 62, with the conversions. Weights stay as they are; pieces are converted.
"""

from typing import Any

import torch
from torch import Tensor, nn

PIECE = 1 << 22  # numbers of a weight that are float32 at a time


def are_slow(weight: Tensor) -> bool:
    """Return whether torch has no fast products for weights of this type on this processor."""
    if not weight.is_cpu or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    name = "bf16" if weight.dtype == torch.bfloat16 else "fp16"
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supported is not None and not supported()


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of a weight (n, e) are a piece."""
    return max(1, PIECE // max(1, weight.shape[1]))


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ in float32, of x (m, e) and W (n, e)."""
    x = x.float()
    out, n = x.new_empty(len(x), len(weight)), rows_at_once(weight)
    for part, block in zip(out.split(n, 1), weight.split(n)):
        torch.mm(x, block.float().T, out=part)
    return out


def times(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W in float32, of x (m, n) and W (n, e)."""
    out, n = x.new_zeros(len(x), weight.shape[1], dtype=torch.float32), rows_at_once(weight)
    for part, block in zip(x.split(n, 1), weight.split(n)):
        out.addmm_(part.float(), block.float())
    return out


class _Product(torch.autograd.Function):
    """x Wᵀ of x (…, e), rounded to its type; W does not learn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return times_transposed(x.flatten(0, -2), weight).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        return times(grad.flatten(0, -2), weight).to(grad.dtype).unflatten(0, grad.shape[:-1]), None


class WideLinear(nn.Linear):
    """A frozen linear layer of 16-bit weights, multiplied in float32."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.weight.dtype:
            return super().forward(input)
        o = _Product.apply(input, self.weight)
        return o if self.bias is None else o + self.bias


def widen_layers(model: nn.Module, but: nn.Module | None = None) -> None:
    """Let frozen linear layers of a model multiply in float32, if their own type is slow here. but: a layer that stays."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not but and not layer.weight.requires_grad and are_slow(layer.weight):
            layer.__class__ = WideLinear
