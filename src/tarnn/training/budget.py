"""Training for a given time: how far the run is by the clock, a learning rate that follows it, and what is left for the end."""

import math
import time
from collections.abc import Callable

from transformers import TrainerCallback

from tarnn.training.processes import shared

WARMUP = 0.02  # of the run, for both kinds of schedule
FLOOR = 0.1  # the last learning rate, of the highest
SHARE = 0.1  # of the time, for all validations: one half for the last, one for those before
SAMPLE_SHARE, SAMPLE_LIMIT = 0.05, 20.0  # of the time, and seconds, for the sample at the end


def cosine(progress: float) -> float:
    """The factor of the learning rate at `progress` ∈ [0, 1]: up over WARMUP, down a cosine to FLOOR."""
    if progress < WARMUP:
        return progress / WARMUP
    down = (min(progress, 1.0) - WARMUP) / (1 - WARMUP)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * down))


class TimeBudget(TrainerCallback):
    """Ends a run so that the whole command takes its `limit` in seconds, the preparation of the data included.

    `seconds` says how long the run has trained, interruptions left out. Time is kept for the last validation, for
    saving and for the sample; a step begins only if there is room for it. `progress` is the part of the training that
    is done: of its time, or of `max_steps` where that is further. It is read off the clock once per step, on the first
    process, and shared, so that all processes have the same learning rate and stop at the same step. A run that follows
    the clock cannot be repeated bit for bit; its log holds the learning rates it had.
    """

    def __init__(self, limit: float, max_steps: int | None, seconds: Callable[[], float], has_sample: bool = True):
        self.limit, self.max_steps, self.seconds = limit, max_steps, seconds
        self.whole = limit
        self.progress = 0.0
        self.saving = 0.0  # seconds for a checkpoint and the model
        self.sample_seconds = min(SAMPLE_SHARE * limit, SAMPLE_LIMIT) if has_sample else 0.0
        self.validation, self.validated = 0.0, 0.0  # seconds: of one, and of all so far
        self._room = True  # for a validation
        self._due = False
        self._step, self._step_began = 0.0, 0.0  # seconds

    def begin(self, spent: float) -> None:
        """Training begins now, `spent` seconds after the command; late as it may be, there is time for some of it."""
        self.whole = max(self.limit - spent, 0.2 * self.limit)

    @property
    def training(self) -> float:
        """Seconds until training must end."""
        return max(self.whole - self.validation - self.saving - self.sample_seconds, 0.2 * self.whole)

    @property
    def over(self) -> bool:
        return self.progress >= 1

    def left(self) -> float:
        """Seconds of the whole that are left."""
        return self.whole - self.seconds()

    def factor(self, _step: int) -> float:
        return cosine(self.progress)

    def plan_validation(self, batch_seconds: float, num_batches: int) -> int:
        """How many of the batches one validation may take, so that it keeps to its share of the time."""
        fits = int(SHARE / 2 * self.limit / max(batch_seconds, 1e-9))
        planned = int(shared(max(1, min(num_batches, fits)))[0])
        self.validation = batch_seconds * planned
        return planned

    def has_validated(self, seconds: float) -> None:
        self.validation = seconds
        self.validated += seconds

    def update(self, step: int, ahead: float = 0.0) -> None:
        """Read the clock, `ahead` seconds from now."""
        seconds = self.seconds()
        spare = SHARE / 2 * seconds - self.validated - self.validation
        done, spare = shared((seconds + ahead) / self.training, spare)
        self.progress = max(done, step / self.max_steps if self.max_steps else 0.0)
        self._room = spare >= 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.update(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = self.seconds()

    def on_step_end(self, args, state, control, **kwargs):
        self._step = self.seconds() - self._step_began
        self.update(state.global_step, self._step)
        self._due = self._due or control.should_evaluate
        if self.over:
            control.should_training_stop = control.should_log = control.should_save = True
            control.should_evaluate = args.eval_strategy != "no"
        else:
            control.should_evaluate = self._due and self._room
        self._due = self._due and not control.should_evaluate


class Clock:
    """Seconds since `start`, on top of those of the run before it was interrupted."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    def start(self, before: float = 0.0) -> None:
        self._before, self._started = before, time.monotonic()

    def __call__(self) -> float:
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)
