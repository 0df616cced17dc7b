"""Milliseconds of work on a GPU, by its own clock; and what there is to run on."""

import statistics
from collections.abc import Callable

import torch

WARM_UP, ROUNDS = 5, 20
FLUSH = 256 << 20  # bytes written between calls, so that none finds its inputs in the cache


def gpu() -> str | None:
    """The GPU's name, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def milliseconds(call: Callable[[], object]) -> float:
    """The median of some calls, each after the cache was overwritten."""
    junk = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(ROUNDS):
        junk.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a copy from memory to memory, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / (milliseconds(lambda: y.copy_(x)) * 1e-3)
