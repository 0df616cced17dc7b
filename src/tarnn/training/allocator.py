"""How freed memory is kept: a training step takes and frees the same blocks again and again."""

import ctypes
import mmap
import sys

from tarnn.large_pages import LARGE_PAGE, wants_large_pages

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 29  # bytes at the end of the heap that are kept rather than given back
MAPPED = 1 << 25  # bytes from which a block has pages of its own: the most that glibc would come to by itself
TOP_PAD = 1 << 17  # glibc's own: bytes by which the heap grows beyond what is asked for


def keep_freed_memory() -> None:
    """For the whole process: blocks of up to 32 MB are used again, and not given back to the system with their pages; and
    the heap's next 480 MB lie in large pages, unless TARNN_LARGE_PAGES=off.

    By default each step of a small model gives megabytes back and takes them again, a page fault for every 4 KB: a
    twentieth of its time. It walks through tens of megabytes, whose small pages the processor has to look up again and again:
    another thirteenth. Only glibc on Linux has these switches; elsewhere nothing happens.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(libc, "mallopt", None)
    if libc is None or mallopt is None:
        return
    mallopt(M_MMAP_THRESHOLD, MAPPED)
    mallopt(M_TRIM_THRESHOLD, KEPT)
    if wants_large_pages():
        mallopt(M_TOP_PAD, KEPT - MAPPED)  # less, or freeing the last block would give all of it back
        begin, end = grown_heap(libc)
        mallopt(M_TOP_PAD, TOP_PAD)
        begin += -begin % LARGE_PAGE
        if begin < end:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def grown_heap(libc: ctypes.CDLL) -> tuple[int, int]:
    """Makes the heap grow, and says from where to where; addresses alone, which take no memory before they are used."""
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    begin = libc.sbrk(ctypes.c_ssize_t(0)) or 0
    blocks: list[int | None] = []
    while (libc.sbrk(ctypes.c_ssize_t(0)) or 0) == begin and len(blocks) < KEPT // MAPPED:
        blocks.append(libc.malloc(ctypes.c_size_t(MAPPED // 2)))  # what was free at the end comes first
    end = libc.sbrk(ctypes.c_ssize_t(0)) or 0
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    return begin, end
