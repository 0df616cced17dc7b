"""How much processor time other processes took while something was measured: their share of all cores (Linux)."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STAT = Path("/proc/stat")
MOST = 0.05  # a time taken beside more than this is better taken again


class Company:
    """`share`: of all cores' time that others took within the context; None where the system does not say."""

    share: float | None = None


@contextmanager
def watched() -> Iterator[Company]:
    """Within: what other processes do is counted. Own threads and ended children are not others."""
    company, before = Company(), now()
    yield company
    after = now()
    if before is not None and after is not None:
        busy, own, wall = (y - x for x, y in zip(before, after, strict=True))
        company.share = max(0.0, busy - own) / max(wall * (os.cpu_count() or 1), 1e-9)


def now() -> tuple[float, float, float] | None:
    """Seconds: of all cores at work or stolen by other machines, of this process and its children, of the clock."""
    if not STAT.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, stolen = map(int, STAT.read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + stolen
    return ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic()
