"""What the machine can do at best, measured in the run that is compared with it: products and copies."""

from collections.abc import Callable
from functools import cache

import torch
from clock import Contender

MATMUL_SIZE = 2048


@cache
def matmul_contender(device: str = "cpu") -> Contender:
    """One float32 product of 2048³ into memory that is already there."""
    a, b, out = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device) for _ in range(3))
    return Contender(lambda: torch.mm(a, b, out=out))


def matmul_gflops(ms: float) -> float:
    return 2 * MATMUL_SIZE**3 / ms / 1e6


def copy_call(num_bytes: int) -> Callable[[], object]:
    """`copy_` of so many bytes: as many are read as are written."""
    source = torch.ones(num_bytes // 4)
    target = torch.zeros(num_bytes // 4)
    return lambda: target.copy_(source)
