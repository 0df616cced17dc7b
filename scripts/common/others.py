"""What share of the processors other processes took while something was measured; what they took too much of is measured again.

A benchmark's own threads raise the load average, so that says nothing. Linux counts the busy time of all processors; less what
this process and those it started took, it is others' time, and the hypervisor's (steal). Elsewhere nobody counts: None.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MOST = 0.05  # of all processors, beyond which a figure is taken again
TRIES = 3
LEAST_SECONDS = 0.2  # Linux counts in hundredths of a second: of less, a share says nothing
PROC = Path("/proc")
Result = TypeVar("Result")


@dataclass
class Record:
    """Of one run of a script: how often a figure may be taken, and others' share of each that was kept."""

    tries: int = 1
    shares: list[float] | None = None

    def start(self, tries: int) -> None:
        self.tries, self.shares = tries, []

    def as_json(self) -> dict[str, Any]:
        shares = sorted(self.shares or [])
        middle = shares[len(shares) // 2] if shares else None
        above = sum(x > MOST for x in shares)
        return {"median": middle, "most": max(shares, default=None), "figures": len(shares), "above": above}


RECORD = Record()


def taken_quietly(measure: Callable[[], Result]) -> tuple[Result, float | None]:
    """(what `measure` returns, others' share): of some tries the one with the least share, the first below `MOST` if any."""
    best: tuple[Result, float | None] | None = None
    for _ in range(max(1, RECORD.tries)):
        watch = Watch()
        result, share = measure(), watch.share()
        if best is None or (share is not None and best[1] is not None and share < best[1]):
            best = result, share
        if share is None or share <= MOST:
            break
    assert best is not None
    if RECORD.shares is not None and best[1] is not None:
        RECORD.shares.append(best[1])
    return best


class Watch:
    """Others' share of all processors since it was made."""

    def __init__(self) -> None:
        self._begun, self._at = time.perf_counter(), _others_seconds()

    def share(self) -> float | None:
        seconds, now = time.perf_counter() - self._begun, _others_seconds()
        if self._at is None or now is None or seconds < LEAST_SECONDS:
            return None
        return max(0.0, now - self._at) / (seconds * (os.cpu_count() or 1))


def _others_seconds() -> float | None:
    """Seconds that all processors were busy with others, since the system began."""
    try:
        fields = [int(x) for x in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, irq, soft, steal = fields
        tick = os.sysconf("SC_CLK_TCK")
        ours = sum(_seconds_of(pid, tick) for pid in _family())
    except (OSError, ValueError):  # no Linux, or a sandbox that hides it
        return None
    return (user + nice + system + irq + soft + steal) / tick - ours


def _family() -> Iterator[int]:
    """This process, and those that descend from it and live."""
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        yield pid
        for task in (PROC / f"{pid}/task").glob("*/children"):
            try:
                waiting += map(int, task.read_text().split())
            except OSError:  # it has just ended
                continue


def _seconds_of(pid: int, tick: int) -> float:
    """What a process took, with its children that have ended: the fields behind its name, which may hold anything."""
    try:
        fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / tick
