"""The most memory that one call holds beyond what was there before it.

On Linux the kernel counts it: pages resident, from a fresh mark to the end of the call, so that buffers which no
allocator of torch's knows of are in it too, and a page written once is a page; what the heap had free and could not
give back hides a little, some tens of KiB. Linux counts on each processor for itself, in batches of 32 pages or more: where a
call moves from one processor to another, some 100 KiB are missing or too many. On a GPU torch's allocator counts.
Elsewhere nobody does: None.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(f: Callable[[], object], device: str = "cpu") -> int | None:
    """Peak of one call, its result included, beyond what is there; what was kept for it from earlier calls is there."""
    if device.startswith("cuda"):
        return _peak_bytes_cuda(f)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # so that what was freed before does not hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # no glibc, no Linux, or a sandbox that forbids it
        f()
        return None
    before = _status("VmRSS")
    result = f()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def _peak_bytes_cuda(f: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated() - before
