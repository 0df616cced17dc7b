"""How freed memory is kept: a training step takes and frees the same blocks again and again."""

import ctypes
import sys

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 29  # bytes at the end of the heap that are kept rather than given back
MAPPED = 1 << 25  # bytes from which a block has pages of its own: the most that glibc would come to by itself


def keep_freed_memory() -> None:
    """For the whole process: blocks of up to 32 MB are used again, and not given back to the system with their pages.

    By default each step of a small model gives megabytes back and takes them again, a page fault for every 4 KB: a
    twentieth of its time. Only glibc has this switch; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        mallopt(M_TRIM_THRESHOLD, KEPT)
