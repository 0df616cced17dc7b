"""How a tensor lies in memory, as kernels take it."""

from torch import Tensor

FARTHEST = 2**24  # elements between neighbouring positions: within a tile, offsets are 32 bits wide


def far(x: Tensor) -> bool:
    """Whether positions of x (b, h, t, …) lie farther apart than kernels can count."""
    return x.ndim > 2 and x.shape[2] > 1 and x.stride(2) > FARTHEST


def in_rows(x: Tensor) -> Tensor:
    """x with its last axis in a row, which kernels read without a stride, and positions that they reach."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and not far(x) else x.contiguous()


def strides(name: str, x: Tensor | None, count: int = 3) -> dict[str, int]:
    """Of the first axes: `q_b`, `q_h`, `q_t`. An axis of one place has none."""
    axes = "bht"[:count]
    if x is None:
        return {f"{name}_{axis}": 0 for axis in axes}
    return {f"{name}_{axis}": x.stride(i) if x.shape[i] > 1 else 0 for i, axis in enumerate(axes)}
