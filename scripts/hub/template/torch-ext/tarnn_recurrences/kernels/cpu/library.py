"""What the compiled library of this folder can compute."""

from functools import cache

from ..._ops import ops


@cache
def refusal() -> str | None:
    """Return why the kernels can't run on this processor, or None."""
    try:
        ops.isa()
    except RuntimeError:
        return "these kernels need AVX2 and FMA on x86-64, which this processor lacks"
    return None


def computes_float64() -> bool:
    return False
