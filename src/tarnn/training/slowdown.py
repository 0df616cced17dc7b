"""A line when training becomes much slower than it was."""

import statistics
from collections.abc import Callable

from transformers import TrainerCallback

SLOWER = 3.0  # times as long as in the fastest stretch: said once
RECOVERED = 2.0  # below this it is said again the next time
LEAST_STEPS, LEAST_SECONDS = 10, 5.0  # of a stretch


class Slowdown(TrainerCallback):
    """Compares stretches of steps: the median seconds of a step with those of the fastest stretch so far.

    seconds: the clock. say: takes the line. Validation and saving lie between steps and are not counted. The median
    leaves out a single long step, as after the machine has slept.
    """

    def __init__(self, seconds: Callable[[], float], say: Callable[[str], None]):
        self.seconds, self.say = seconds, say
        self.steps: list[float] = []  # seconds, of this stretch
        self.fastest = float("inf")
        self.slow = False
        self.begun = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = self.seconds()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.seconds() - self.begun)
        if len(self.steps) >= LEAST_STEPS and sum(self.steps) >= LEAST_SECONDS:
            self.judge(statistics.median(self.steps))
            self.steps.clear()

    def judge(self, now: float) -> None:
        self.fastest = min(self.fastest, now)
        factor = now / self.fastest
        if factor >= SLOWER and not self.slow:
            self.say(
                f"A step takes {factor:.1f} times as long as it did: {1000 * now:,.0f} ms, before {1000 * self.fastest:,.0f}. "
                "Another program may be using the processor."
            )
        self.slow = factor >= (RECOVERED if self.slow else SLOWER)
