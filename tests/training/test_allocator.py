"""Freed memory is kept for the next step."""

import os
import platform
import subprocess
import sys
from pathlib import Path

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


LARGE = """
import ctypes, re
from tarnn.training.allocator import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(20 << 20) for _ in range(5)]
for block in blocks:
    libc.free(ctypes.c_void_p(block))
middle = libc.malloc(20 << 20) + (10 << 20)
for line in open("/proc/self/smaps"):
    if area := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
        begin, end = (int(x, 16) for x in area.groups())
    elif line.startswith("VmFlags:") and begin <= middle < end:
        print("hg" in line.split())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's switch")
def test_a_step_takes_the_memory_that_the_one_before_freed():
    """Three blocks of 512 pages: without the call every step has page faults again, with it none."""

    def faults(line):
        run = subprocess.run([sys.executable, "-c", STEPS.format(line)], capture_output=True, text=True, check=True)
        return float(run.stdout)

    assert faults("keep_freed_memory()") < 1
    assert faults("") > 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's switch")
@pytest.mark.parametrize(("wish", "found"), [("on", "True"), ("off", "False")])
def test_the_heap_grows_into_large_pages(wish, found):
    """Also after blocks were freed: what is asked for stays."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a kernel without large pages")
    environment = {**os.environ, "TARNN_LARGE_PAGES": wish}
    run = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == [found]
