"""What one sees while a model trains: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tarnn.tasks import Facts
from tarnn.training.metrics import bits_per_byte

LINE_EVERY = 10.0  # seconds, without a terminal


class Progress(TrainerCallback):
    """Loss in bits per byte (or dimension), speed and time left, on stderr; each evaluation gets a line that stays.

    `fraction` says how much of the run is done, from 0 to 1. Only the first process shows anything.
    """

    def __init__(
        self, fraction: Callable[[int], float], seconds: Callable[[], float], facts: Facts, show: bool = True
    ):
        self.fraction, self.seconds, self.facts = fraction, seconds, facts
        self.show = show
        self.unit = facts.unit.replace("_per_", "/")
        self.bar: Any = None
        self.task: Any = None
        self.best = float("inf")
        self.text = ""
        self.last_line = 0.0
        self.since = (0, 0.0)  # step and seconds when this process began

    def on_train_begin(self, args, state, control, **kwargs):
        self.since = (state.global_step, self.seconds())
        if self.show and sys.stderr.isatty():
            self.bar = make_bar()
            self.task = self.bar.add_task("", total=1.0, text="")
            self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(self.task, completed=min(1.0, self.fraction(state.global_step)))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            bits = bits_per_byte(logs["loss"], self.facts.bytes_per_token)
            self.text = f"step {state.global_step:,}  {bits:.3f} {self.unit}"
            steps, seconds = state.global_step - self.since[0], self.seconds() - self.since[1]
            if seconds > 0:
                self.text += f"  {steps * self.facts.per_step / seconds:,.0f} {self.facts.counted}/s"
            if self.bar is not None:
                self.bar.update(self.task, text=self.text)
            elif time.monotonic() - self.last_line > LINE_EVERY:
                self.last_line = time.monotonic()
                self.say(f"{100 * min(1.0, self.fraction(state.global_step)):3.0f} %  {self.text}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        now = (metrics or {}).get("eval_bits_per_byte", float("inf"))
        mark = "  best so far" if now < self.best else ""
        self.best = min(self.best, now)
        self.say(f"step {state.global_step:,}: validation {now:.4f} {self.unit}{mark}")

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        elif self.show:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was; also after an error."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def make_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Bar(*columns, console=Console(stderr=True), refresh_per_second=4)
