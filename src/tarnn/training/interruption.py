"""Ctrl-C and SIGTERM: the run saves at the end of its step, and stops. A second one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tarnn.training.processes import distributed, largest

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
