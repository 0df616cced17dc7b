"""Progress of work that may take long: a bar on a terminal, elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tarnn.log import Log, silent

T = TypeVar("T")
QUIET = 2.0  # seconds that may pass before the first line
EVERY = 5.0


def progress(
    steps: Iterable[T], total: int | None, text: str, report: Log | None, *, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield the same steps, and report progress. `total`: the sum of their sizes, if it is known."""
    quiet = report is silent
    if sys.stderr.isatty() and not quiet:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(text, total=total)
            for step in steps:
                yield step
                bar.advance(task, size(step))
        return
    start, done = time.monotonic(), 0
    next_line = QUIET
    for step in steps:
        yield step
        done += size(step)
        seconds = time.monotonic() - start
        if seconds > next_line and not quiet:
            next_line = seconds + EVERY
            left = "" if total is None else f" of {total:,}, about {seconds * (total - done) / done:.0f} s left"
            report(f"tarnn: {text}: {done:,}{left}")  # type: ignore[misc]  # mypy takes it for what `silent` returns
