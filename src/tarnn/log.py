"""Lines about what happens, for the user; and a line now and then while something takes its time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]  # takes one line


def silent(_: str) -> None:
    """The log of a command that is to be quiet."""


FIRST, THEN = 2.0, 10.0  # seconds until the first line, and between the others


@contextmanager
def ticking(what: str, log: Log, so_far: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Within: after two seconds, and then every ten, `log` gets a line: what, how long, and how far it is."""
    done, started = threading.Event(), time.monotonic()

    def tick() -> None:
        wait = FIRST
        while not done.wait(wait):
            wait = THEN
            seconds, far = time.monotonic() - started, so_far()
            log(f"{what}: {clock_time(seconds)}" + (f", {far}" if far else ""))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def clock_time(seconds: float) -> str:
    """65 → '1:05'; 3,665 → '1:01:05'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
