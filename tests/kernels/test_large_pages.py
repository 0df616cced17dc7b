"""Packed weights are in large pages: from the beginning where they are few, or moved there once they are written."""

import mmap
import os
import re
from pathlib import Path
from threading import Event

import pytest
import torch

from tarnn import large_pages
from tarnn.kernels.cpu.products import Block
from tarnn.large_pages import LARGE_PAGE, can_move, move_to_large_pages, take_large_pages

ON_LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux")
MOVES = pytest.mark.skipif(
    not (large_pages.wants_large_pages() and can_move()), reason="the system moves no memory to large pages"
)


@ON_LINUX
@pytest.mark.parametrize(("value", "asked"), [("off", 0), ("on", 1), ("", 1)])
def test_they_are_asked_for_unless_switched_off(monkeypatch, value, asked):
    seen = []
    monkeypatch.setattr(large_pages, "advise", lambda *arguments: seen.append(arguments))
    monkeypatch.setenv("TARNN_LARGE_PAGES", value)
    block = Block(1)
    block.vector(torch.ones(LARGE_PAGE))
    packed = block.bytes()
    assert len(seen) == asked
    for begin, end, advice in seen:
        assert packed.data_ptr() <= begin < end <= packed.data_ptr() + packed.nbytes
        assert (begin % LARGE_PAGE, end % LARGE_PAGE, advice) == (0, 0, mmap.MADV_HUGEPAGE)


def in_large_pages(x):
    """Bytes of the part of this process's memory that x lies in which are in large pages."""
    found = 0
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{os.getpid()}/smaps").read_text(), flags=re.M)[1:]:
        begin, end = (int(place, 16) for place in part.split()[0].split("-"))
        if begin < x.data_ptr() + x.nbytes and x.data_ptr() < end:
            found += 1024 * int(re.search(r"AnonHugePages: +(\d+)", part)[1])
    return found


@MOVES
def test_much_memory_is_moved_and_keeps_its_numbers(monkeypatch):
    monkeypatch.setattr(large_pages, "MUCH", 10 * LARGE_PAGE)
    x = torch.empty(12 * LARGE_PAGE // 8, dtype=torch.int64)
    assert not take_large_pages(x)
    torch.arange(len(x), out=x)
    before = in_large_pages(x)
    move_to_large_pages(x).join()
    assert in_large_pages(x) > before
    assert torch.equal(x, torch.arange(len(x)))


@MOVES
def test_memory_that_is_gone_is_not_touched(monkeypatch):
    """It goes while its first piece is moved."""
    seen, is_gone = [], Event()

    def advise(*arguments):
        is_gone.wait()
        seen.append(arguments)
        return True

    monkeypatch.setattr(large_pages, "advise", advise)
    memory = torch.ones(12 * LARGE_PAGE, dtype=torch.uint8)
    thread = move_to_large_pages(memory)
    del memory
    is_gone.set()
    thread.join()
    assert len(seen) <= 1
