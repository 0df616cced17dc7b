"""Memory in large pages, which a processor reads faster than small ones."""

import ctypes
import mmap
import os
from contextlib import suppress
from functools import cache
from threading import Thread
from weakref import ref

import torch
from torch import Tensor

LARGE_PAGE = 2**21  # bytes
COLLAPSE = 25  # advice that module mmap has no name for, of Linux 6.1
MUCH = 2**26  # bytes
AT_ONCE = 4  # pages that are moved between two looks at whether the memory is still there


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


def take_large_pages(x: Tensor) -> bool:
    """Ask for large pages for contiguous memory that will be written for the first time; False if they had better come later.

    A page is zeroed when it is first written. In a virtual machine whose host has to find the memory this takes 2 s per GB of
    large pages, elsewhere 0.1 s; small ones take 0.4 s. So much memory gets small pages first, and is usable at once. After
    False, `move_to_large_pages` when it is written.
    """
    if not wants_large_pages():
        return True
    begin, end = _whole_pages(x)
    if end - begin >= MUCH and can_move():
        return False
    advise(begin, end, mmap.MADV_HUGEPAGE)
    return True


def move_to_large_pages(x: Tensor) -> Thread:
    """Move contiguous memory to large pages, piece by piece, in a thread that ends early if nobody has `x` any more.

    Its numbers can be read meanwhile.
    """
    begin, end = _whole_pages(x)
    memory = ref(x)

    def move() -> None:
        for at in range(begin, end, AT_ONCE * LARGE_PAGE):
            held = memory()
            if held is None or not advise(at, min(at + AT_ONCE * LARGE_PAGE, end), COLLAPSE):
                return
            del held

    thread = Thread(target=move, name="tarnn-large-pages", daemon=True)
    thread.start()
    return thread


@cache
def can_move() -> bool:
    """Say whether the system moves memory to large pages when it is told to."""
    memory = torch.ones(2 * LARGE_PAGE, dtype=torch.uint8)
    begin, end = _whole_pages(memory)
    return advise(begin, end, COLLAPSE)


def _whole_pages(x: Tensor) -> tuple[int, int]:
    """Return where the first large page within a tensor's memory begins, and where the last one ends."""
    first, last = -(-x.data_ptr() // LARGE_PAGE), (x.data_ptr() + x.nbytes) // LARGE_PAGE
    return first * LARGE_PAGE, max(first, last) * LARGE_PAGE


def advise(begin: int, end: int, advice: int) -> bool:
    """Call `madvise`, without Python's lock; return whether the system took it."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return not call(begin, end - begin, advice)
