"""Which backend computes each op on this machine, and why not a faster one."""

from typing import Any, NamedTuple

import torch

from tarnn.kernels import (
    convolution,
    cross_entropy,
    delta,
    diagonal_scan,
    elementwise,
    hybrid,
    linear,
    low_rank_delta,
    mixture,
    selective_scan,
)
from tarnn.kernels.contract import named, reasons
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.kernels.fla import availability


class Choice(NamedTuple):
    backend: str
    reasons: dict[str, str]  # why each backend before it refused


def choices() -> dict[str, Choice]:
    """For each op, who computes a small float32 call on a CPU."""
    x, n = torch.ones(1, 1, 1, 3), torch.ones(1, dtype=torch.int64)
    without_features = (*[x] * 5, *[None] * 4, x, x, x, n, n, *[None] * 9, 1, True, 1.0, 0.0, False, True)
    calls: dict[str, Any] = {
        "linear": linear.Call(x, x, x),
        "delta": delta.Call(x, x, x, x[..., 0]),
        "low_rank_delta": low_rank_delta.Call(x, x, x, x, x),
        "hybrid": hybrid.Call._make(without_features),
        "diagonal_scan": diagonal_scan.Call(x[0], x[0]),
        "selective_scan": selective_scan.Call(x[0], x[0], x[0, 0].mT, x[0, :, :, :1], x[0, :, :, :1]),
        "convolution": convolution.Call(x[0], x[0, 0].mT, None, None, None, None, True, False),
        "elementwise": elementwise.Call(x, x, None, "swiglu"),
        "cross_entropy": cross_entropy.Call(x[0, 0], x[0, 0], n, n[0], -100),
        "mixture": mixture.Call(x[0, 0], x[0, 0, :, :1], x[0, 0, :, :1], 1.0, -1.0, 1.0),
    }
    found = {}
    for op, call in calls.items():
        answers = reasons(op, call)
        found[op] = Choice(list(answers)[-1], {name: why for name, why in answers.items() if why is not None})
    return found


def cpu_kernels() -> dict[str, str]:
    """The compiled kernels that CPUs take, and why. ValueError for a setting that nobody knows."""
    return library.status()._asdict()


def products_by() -> dict[str, str]:
    """Return what multiplies rows with packed weights on this processor, by format of the weights; {} without compiled kernels.

    An instruction (amx, vdpbf16ps, vpdpbusd …); "float32" where bfloat16 weights are widened.
    """
    if not library.available():
        return {}
    return {name: str(torch.ops.tarnn_cpu.products(i)) for i, name in enumerate(FORMATS)}


def gpu_kernels() -> dict[str, str] | None:
    """Return what computes on the first GPU, why, and for which ops; None without a GPU."""
    ops = ", ".join(sorted(op for op in choices() if named("fla", op) is not None))
    return availability.status(0)._asdict() | {"ops": ops} if torch.cuda.is_available() else None
