"""A call of the cross-entropy of a linear layer's outputs, and what it gives: the records of every backend."""

from typing import Any, NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """Rows x (n, d), the layer's weight (v, d), and the labels (n,), int64: classes, or `ignored`."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    divisor: Tensor  # (), of the sum over rows
    ignored: int


class Outputs(NamedTuple):
    o: Tensor  # (), float32 at least
    grad_x: Tensor | None = (
        None  # of o, for a backend that makes them while it has the logits; None where no gradient is needed
    )
    grad_weight: Tensor | None = None


class Gradients(NamedTuple):
    x: Any
    weight: Any
