"""Training for a given time: how far the run is by the clock, and a learning rate that follows it."""

import math
import time
from collections.abc import Callable

import torch
from transformers import TrainerCallback

WARMUP = 0.02  # of the run, for both kinds of schedule
FLOOR = 0.1  # the last learning rate, of the highest


def cosine(progress: float) -> float:
    """The factor of the learning rate at `progress` ∈ [0, 1]: up over WARMUP, down a cosine to FLOOR."""
    if progress < WARMUP:
        return progress / WARMUP
    down = (min(progress, 1.0) - WARMUP) / (1 - WARMUP)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * down))


class TimeBudget(TrainerCallback):
    """Ends a run when its minutes are over; evaluation and checkpoints on the way are in them.

    `progress` is the part of the run that is done: of the time, or of `max_steps` where that is further. It
    is read off the clock once a step, on the first process, and shared, so that all of them have the same
    learning rate and stop at the same step. `seconds` says how long the run has trained, interruptions left
    out. A run that follows the clock cannot be repeated bit for bit; its log holds the learning rates it had.
    """

    def __init__(self, limit: float, max_steps: int | None, seconds: Callable[[], float]):
        self.limit = limit
        self.max_steps = max_steps
        self.seconds = seconds
        self.progress = 0.0

    def factor(self, _step: int) -> float:
        return cosine(self.progress)

    def update(self, step: int) -> None:
        done = torch.tensor(self.seconds() / self.limit, dtype=torch.float64)
        if torch.distributed.is_initialized():
            if torch.distributed.get_backend() == "nccl":
                done = done.float().cuda()
            torch.distributed.broadcast(done, src=0)
        self.progress = max(done.item(), step / self.max_steps if self.max_steps else 0.0)

    def on_train_begin(self, args, state, control, **kwargs):
        self.update(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self.update(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress >= 1:
            control.should_training_stop = control.should_log = control.should_save = True
            control.should_evaluate = args.eval_strategy != "no"


class Clock:
    """Seconds since `start`, on top of those of the run before it was interrupted."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    def start(self, before: float = 0.0) -> None:
        self._before, self._started = before, time.monotonic()

    def __call__(self) -> float:
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)
