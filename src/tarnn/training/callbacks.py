"""Callbacks between steps: new draws of random features, and signals that stop a run."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tarnn.attention.calibration import calibrated_layers, calibrating
from tarnn.feature_maps import RandomFeatureMap
from tarnn.training.processes import distributed, largest


def random_maps(module: nn.Module) -> list[RandomFeatureMap]:
    """The maps in `module` that have draws; one whose ω was made a parameter has none: training changes it."""
    maps = (x for x in module.modules() if isinstance(x, RandomFeatureMap))
    return [x for x in maps if not isinstance(x.omega, nn.Parameter)]


class Redraw(TrainerCallback):
    """Before every `every`-th step: new draws for random features, and new calibration where maps take it.

    Draw number n belongs to the steps from n·every on, and is a function of its seed and of n alone. So a run
    that is resumed sees the draws of one that was not interrupted, and all processes of a run see the same. An
    unlucky draw no longer decides a whole training (Choromanski et al. 2021, figures 5 and 15, arXiv 2009.14794).
    Nothing is drawn in evaluation, which is of the model as it would be saved at that step.

    every: 0 keeps the first draw, and calibrates once, before the first step.
    forward: runs the model that it is given on some thousand tokens, the same at every call and on all processes,
        to calibrate with (`tarnn.attention.calibrating`); None: maps stay as they are. It is called without
        gradients and dropout, so a resumed run finds the same parameters.
    """

    def __init__(self, every: int, forward: Callable[[nn.Module], Any] | None = None):
        if every < 0:
            raise ValueError(f"Redraw needs every ≥ 0 steps, 0 for never; got {every}.")
        self.every, self.forward = every, forward

    def on_step_begin(self, args, state, control, **kwargs):
        model = kwargs["model"]
        step = state.global_step
        if step % self.every if self.every else step:
            return
        draw = step // self.every if self.every else 0
        for phi in random_maps(model):
            if int(phi.draw) != draw:
                phi.redraw(draw)
        if self.forward is not None and calibrated_layers(model):
            calibrate(model, self.forward)


@torch.no_grad()
def calibrate(model: nn.Module, forward: Callable[[nn.Module], Any]) -> None:
    """One forward of `model`, as in evaluation, that sets its maps."""
    training = model.training
    model.eval()
    try:
        with calibrating(model):
            forward(model)
    finally:
        model.train(training)


# torchrun passes on what its processes have got from the terminal already: within these seconds that is no second one
ECHO = 10.0


class InterruptedRun(KeyboardInterrupt):
    """A run that was asked to stop, and has saved what it had."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path | None):
        self.exit_code, self.step, self.checkpoint = 128 + signal_number, step, checkpoint
        super().__init__(f"stopped after step {step}")


class Interruption(TrainerCallback):
    """Asks the Trainer to save and stop, on all processes at the same step, once any of them has got a signal."""

    def __init__(self, show: bool):
        self.show = show
        self.signal = 0  # its number, once there was one
        self._since = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, signals are for this object. Only the main thread may take them; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: Any) -> None:
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
            if self.show:  # print() must not be called while it is being called
                os.write(2, b"\ntarnn: finishing this step and saving; again to stop at once\n")
        elif not distributed() or time.monotonic() - self._since > ECHO:
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt

    def agreed(self) -> bool:
        """Whether any process has got a signal. All of them must ask at the same time."""
        number = largest(self.signal)
        if number and not self.signal:
            self._since = time.monotonic()
        self.signal = number
        return bool(number)

    def on_step_end(self, args, state, control, **kwargs):
        if self.agreed():
            control.should_training_stop = control.should_log = control.should_save = True
            control.should_evaluate = False
