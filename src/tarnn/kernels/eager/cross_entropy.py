"""The cross-entropy of a linear layer's outputs, all logits at once."""

from torch.nn import functional

from tarnn.kernels.cross_entropy import Call, Outputs
from tarnn.kernels.eager import refusal as refusal
from tarnn.numerics import widen


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    logits = widen(functional.linear(call.x, call.weight))
    nats = functional.cross_entropy(logits, call.labels, ignore_index=call.ignored, reduction="sum")
    return Outputs(nats / call.divisor)
