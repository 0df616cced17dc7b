"""How much of the processors others took: counted from what Linux says of all and of this process's family."""

import os

import pytest

from scripts.common import others
from scripts.common.others import MOST, Record, Watch, taken_quietly


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """proc(all, pid=(user, system, …)): a /proc whose processors were busy for so many ticks, and these processes too."""
    monkeypatch.setattr(others, "PROC", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)

    def write(busy, children=(), **processes):
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 5000 7 0 0 0 0 0\ncpu0 1 2 3\n")
        for pid, ticks in {str(os.getpid()): processes.pop("me"), **processes}.items():
            folder = tmp_path / pid.strip("p") / "task" / "1"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "children").write_text(" ".join(map(str, children)) if pid == str(os.getpid()) else "")
            fields = ["S", *["0"] * 10, *map(str, ticks), "0"]
            (tmp_path / pid.strip("p") / "stat").write_text(f"{pid} (a) name) {' '.join(fields)}")

    return write


def test_what_is_left_of_all_is_others(proc):
    """Neither our threads, nor children that live or have ended, nor waiting for disks."""
    proc(1000, children=[77], me=(100, 50, 20, 10), p77=(200, 20, 0, 0))
    assert others._others_seconds() == pytest.approx((1000 - 180 - 220) / 100)
    proc(1000, me=(100, 50, 20, 10))
    assert others._others_seconds() == pytest.approx((1000 - 180) / 100)


def test_what_others_disturbed_is_taken_again_and_the_best_is_kept(monkeypatch):
    shares, record = [], Record(3, [])
    monkeypatch.setattr(others, "RECORD", record)
    monkeypatch.setattr(Watch, "share", lambda self: shares.pop(0))
    runs = iter(range(10))
    measure = lambda: next(runs)  # noqa: E731
    shares[:] = [0.4, 0.01]
    assert taken_quietly(measure) == (1, 0.01)
    shares[:] = [0.4, 0.2, 0.3]
    assert taken_quietly(measure) == (3, 0.2)
    shares[:] = [MOST]
    assert taken_quietly(measure) == (5, MOST)
    shares[:] = [None]
    assert taken_quietly(measure) == (6, None)
    assert record.as_json() == {"median": MOST, "most": 0.2, "figures": 3, "above": 1}
