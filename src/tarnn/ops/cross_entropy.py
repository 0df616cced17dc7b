"""The loss of a language model from its hidden states, without all of its logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.kernels.cross_entropy import Call, Gradients, Outputs
from tarnn.numerics import autocast
from tarnn.ops.registration import Op

_apply = Op("cross_entropy", Call, Outputs, Gradients)


def linear_cross_entropy(
    x: Float[Tensor, "... d"],
    weight: Float[Tensor, "v d"],
    labels: Int[Tensor, "..."],
    *,
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of logits x · weightᵀ in nats: the sum of log Σ_c e^{logit_c} − logit_label over rows.

    It is divided by `num_items`, by default the number of labels that are not `ignore_index` (NaN where there is none). On a CPU
    the head's product and the loss go by blocks of rows, 64 MB of float32 logits at a time, and rows without a label are left
    out. In the forward pass gradients of x and of a weight that learns are made at once, the weight's summed in float32: kept
    until the backward pass are these, never logits. Logits are rounded to x's type, as a linear layer rounds them; their softmax
    and the loss are float32, or float64. Of torch's `cross_entropy` it has no class weights and no label smoothing.

    torch 2.13's `torch.nn.functional.linear_cross_entropy` is alike; its loss has x's type, bfloat16's three digits, and no
    second derivatives.
    """
    x, weight = autocast(x, weight)
    labels = labels.flatten()
    count = (labels != ignore_index).sum() if num_items is None else num_items
    return _apply(Call(x.flatten(0, -2), weight, labels, torch.as_tensor(count, device=x.device), ignore_index)).o
