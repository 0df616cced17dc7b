"""How long calls take: contenders measured in turns, so that whatever else the machine does hits all alike.

A contender's first call is a warm-up and says how long one takes. Then come the rounds: in each, every contender
in turn makes as many calls as fill `seconds_a_round`, and the round is worth their mean. Reported is the median
of the rounds, with the least and the most. A call slower than its contender's patience is not repeated: its first
is its time, and says so by `rounds = 1`. Where other processes took too much of the processors meanwhile, all is
measured again (`others.py`). Memory is that of a call after the rounds, when code and buffers are there;
where a call takes over a second, of the first.
"""

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from scripts.common.memory import peak_bytes
from scripts.common.others import taken_quietly

MOST_CALLS = 2000
SLOW = 1.0  # seconds a call, from which warming up more than once is a waste
Key = TypeVar("Key", bound=Hashable)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Within: torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Contender:
    """One call to be timed, in the surroundings (a context manager, not timed) that it is made in."""

    call: Callable[[], object]
    patience: float = 4.0  # seconds a call
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    release: Callable[[], object] = lambda: None  # gives back what is kept between calls, before a look at memory


@dataclass(frozen=True)
class Effort:
    """How much is spent on one contender."""

    seconds_a_round: float = 0.03
    seconds: float = 2.5  # for all of its rounds
    rounds: tuple[int, int] = (3, 7)  # no fewer, no more

    def plan(self, seconds_a_call: float) -> tuple[int, int]:
        """(rounds, calls a round)."""
        calls = int(min(MOST_CALLS, max(1.0, self.seconds_a_round / max(seconds_a_call, 1e-9))))
        least, most = self.rounds
        return int(min(most, max(least, self.seconds / max(calls * seconds_a_call, 1e-9)))), calls


@dataclass(frozen=True)
class Timing:
    """Median, least and most milliseconds a call; peak bytes above what was there before a call, where it is known; the share of
    the processors that other processes took meanwhile."""

    ms: float
    ms_min: float
    ms_max: float
    rounds: int
    calls: int
    peak_bytes: int | None
    others: float | None = None


def measure_in_turns(contenders: Mapping[Key, Contender], effort: Effort, device: str = "cpu") -> dict[Key, Timing]:
    """Return one Timing per contender. An exception in any of them aborts the measurement."""
    gc.freeze()  # what is there stays, so that collecting before each look at memory is cheap
    try:
        timings, share = taken_quietly(lambda: _measure_in_turns(contenders, effort, device))
    finally:
        gc.unfreeze()
    return {key: replace(timing, others=share) for key, timing in timings.items()}


def _measure_in_turns(contenders: Mapping[Key, Contender], effort: Effort, device: str) -> dict[Key, Timing]:
    seconds, peaks, plans = {}, {}, {}
    times: dict[Key, list[float]] = {key: [] for key in contenders}
    for key, one in contenders.items():
        with one.surroundings():
            one.release()
            seconds[key], peaks[key] = metered(one.call, device)
            if seconds[key] < SLOW:
                seconds[key] = seconds_of(one.call, 1, device)
            if seconds[key] <= one.patience:
                plans[key] = effort.plan(seconds[key])
    for i in range(max((rounds for rounds, _ in plans.values()), default=0)):
        for key, (rounds, calls) in plans.items():
            if i < rounds:
                with contenders[key].surroundings():
                    times[key].append(1000 * seconds_of(contenders[key].call, calls, device))
    for key, one in contenders.items():
        if seconds[key] < SLOW:
            with one.surroundings():
                one.release()
                peaks[key] = metered(one.call, device)[1]
    timings = {}
    for key in contenders:
        rounds = times[key] or [1000 * seconds[key]]
        calls = plans[key][1] if key in plans else 1
        timings[key] = Timing(statistics.median(rounds), min(rounds), max(rounds), len(rounds), calls, peaks[key])
    return timings


def seconds_of(f: Callable[[], object], calls: int, device: str = "cpu") -> float:
    """Seconds a call, the mean of some."""
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        f()
    wait_for(device)
    return (time.perf_counter() - start) / calls


def metered(f: Callable[[], object], device: str) -> tuple[float, int | None]:
    """(seconds, peak bytes) of one call: both at once, since a slow one is not to be made twice."""
    seconds = 0.0

    def call() -> object:
        nonlocal seconds
        start = time.perf_counter()
        result = f()
        wait_for(device)
        seconds = time.perf_counter() - start
        return result

    peak = peak_bytes(call, device)
    return seconds, peak


def wait_for(device: str) -> None:
    """Until the device has done what it was given: a GPU's clock is not ours."""
    if device != "cpu":
        torch.accelerator.synchronize(device)
