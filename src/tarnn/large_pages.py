"""Memory in large pages, which a processor reads faster than small ones."""

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

LARGE_PAGE = 2**21  # bytes


def wants_large_pages() -> bool:
    """Say whether to ask for large pages: where the system has them, unless TARNN_LARGE_PAGES=off."""
    return hasattr(mmap, "MADV_HUGEPAGE") and os.environ.get("TARNN_LARGE_PAGES") != "off"


def zeros_in_large_pages(x: Tensor) -> Tensor:
    """Make contiguous zeros of x's shape, type and device; on a CPU, from 2 MB on, in large pages if the system has them.

    These come fresh from the system, so a page takes memory once it is written. A long cache is read in order, with little
    work per number; with pages of 4 KB a tenth to a third of the time goes into finding them. TARNN_LARGE_PAGES=off
    switches this off.
    """
    if not _fills_large_pages(x):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def _fills_large_pages(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and x.nbytes >= LARGE_PAGE and wants_large_pages()
