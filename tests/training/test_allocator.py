"""Freed memory is kept for the next step."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource
from tarnn.training.allocator import keep_freed_memory
{}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
sizes = [1 << 21] * 3

def step():
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's switch")
def test_a_step_takes_the_memory_that_the_one_before_freed():
    """Three blocks of 512 pages: without the call every step has page faults again, with it none."""

    def faults(line):
        run = subprocess.run(
            [sys.executable, "-c", STEPS.format(line)], capture_output=True, text=True, check=True
        )
        return float(run.stdout)

    assert faults("keep_freed_memory()") < 1
    assert faults("") > 100
