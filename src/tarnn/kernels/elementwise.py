"""A call of an elementwise layer, RMSNorm or SwiGLU's product, and what it gives: the records of every backend."""

from typing import Any, NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """rms_norm: x (…, n), the weight y (n,) and a gate z, as x; swiglu: the gate x and y, which it lets through, of one shape."""

    x: Tensor
    y: Tensor
    z: Tensor | None
    function: str
    eps: float | None = None  # of rms_norm; None: the smallest number with 1 + eps > 1 in x's dtype


class Outputs(NamedTuple):
    o: Tensor
    scale: Tensor | None = None  # (…)  rms_norm: what each row was multiplied with, for a backend's own backward


class Gradients(NamedTuple):
    x: Any
    y: Any
    z: Any
