"""The cross-entropy of a linear layer's outputs, by blocks of rows, so that all logits are never there at once.

The gradients are made in the forward pass, while a block's logits are in hand: nothing is computed twice, and what is kept is as
large as x and, where it learns, as the weight. Rows without a label are left out. Products are PyTorch's own, but for those of 16
bits where it is slow at them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tarnn.kernels.cpu import wide_products
from tarnn.kernels.cross_entropy import Call, Gradients, Outputs
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import full_precision, wide

BLOCK = 1 << 24  # logits of a block


def refusal(call: Call) -> str | None:
    """Why blocks can't compute this call, or None."""
    x, weight, labels = call[:3]
    if not all(map(is_untraced, (x, weight, labels))):
        return "A traced call is computed in plain PyTorch."
    if not x.is_cpu or x.dtype != weight.dtype:
        return "Blocks are for CPUs, and for a weight of the rows' type."
    if x.ndim != 2 or weight.shape[1:] != x.shape[1:] or labels.shape != x.shape[:1]:
        return "These shapes don't fit each other; PyTorch's own operations say why."
    return None


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    x, weight, labels, divisor, ignored = call
    rows = (labels != ignored).nonzero()[:, 0]
    o = x.new_zeros((), dtype=wide(x.dtype))
    grad_x = torch.zeros_like(x) if for_backward and x.requires_grad else None
    # sums of a 16-bit weight's gradient are float32: each block would round them
    grad_weight = torch.zeros_like(weight, dtype=o.dtype) if for_backward and weight.requires_grad else None
    slow = not weight.requires_grad and wide_products.are_slow(weight)
    with torch.no_grad(), full_precision(x):
        for block in rows.split(max(1, BLOCK // max(1, len(weight)))):
            y, label = x[block], labels[block]
            logits = wide_products.times_transposed(y, weight) if slow else y @ weight.T
            logits = functional.log_softmax(logits, -1, dtype=o.dtype)
            o += functional.nll_loss(logits, label, reduction="sum", ignore_index=ignored)
            if grad_x is None and grad_weight is None:
                continue
            grad = logits.exp_()  # softmax − one-hot
            grad[torch.arange(len(block)), label] -= 1
            grad /= divisor
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, y.to(o.dtype))
            if grad_x is not None:
                product = wide_products.times(grad, weight) if slow else grad.to(x.dtype) @ weight
                grad_x[block] = product.to(x.dtype)
    return Outputs(o / divisor, grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))


def backward(call: Call, returned: Any) -> Gradients:
    def scaled(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * returned.grad_o.to(grad.dtype)

    return Gradients(scaled(returned.grad_x), scaled(returned.grad_weight))
