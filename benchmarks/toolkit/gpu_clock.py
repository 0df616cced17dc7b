"""Milliseconds of work on a GPU, by its own clock; and what there is to run on.

A dry run goes through a script on the CPU, with tiny sizes, so that no mistake in it wastes a GPU's time.
"""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP, ROUNDS = 5, 20
FLUSH = 256 << 20  # bytes written between calls, so that none finds its inputs in the cache


def gpu() -> str | None:
    """The GPU's name, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def where(options) -> str | None:
    """The device of the measurement; None: there is nothing to measure on."""
    if options.dry_run:
        return "cpu"
    return "cuda" if gpu() else None


def about(options, without: str = "") -> str:
    """The first line of a page."""
    if options.dry_run:
        return "A dry run on a CPU, to see that the script runs: no figure here means anything."
    return f"Measured on {gpu()}." if gpu() else f"Not measured on a GPU: there was none.{without}"


def milliseconds(call: Callable[[], object], device: str = "cuda") -> float:
    """The median of some calls, each after the cache was overwritten."""
    if device == "cpu":
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
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
