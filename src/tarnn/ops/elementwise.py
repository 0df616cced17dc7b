"""The elementwise layers between matrix products: one pass over memory each where compiled kernels take them, forward and
backward; else PyTorch's own operations, which torch.compile fuses itself."""

from jaxtyping import Float
from torch import Tensor

from tarnn.kernels.elementwise import Call, Gradients, Outputs
from tarnn.ops.registration import Op

_apply = Op("elementwise", Call, Outputs, Gradients)


def rms_norm(
    x: Float[Tensor, "... n"],
    weight: Float[Tensor, " n"],
    eps: float | None,
    gate: Float[Tensor, "... n"] | None = None,
) -> Float[Tensor, "... n"]:
    """x · weight / √(mean(x²) + eps), the mean over the last axis (Zhang and Sennrich 2019, eq. 4, arXiv 1910.07467).

    eps: None is the smallest number with 1 + eps > 1 in x's dtype. gate: the result is multiplied by silu(gate). x in 16 bits is
    computed in float32, with a weight in x's dtype or in float32. Kept for backward: x, the gate, and one number per row.
    """
    return _apply(Call(x, weight, gate, "rms_norm", eps)).o


def swiglu(gate: Float[Tensor, "... n"], up: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """silu(gate) ⊙ up, silu(a) = a / (1 + e^−a) (Shazeer 2020, arXiv 2002.05202). Kept for backward: gate and up."""
    return _apply(Call(gate, up, None, "swiglu")).o
