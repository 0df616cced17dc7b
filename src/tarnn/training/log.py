"""The log of a run: a file of lines, and a line on stderr that shows how far it is."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tarnn.log import clock_time
from tarnn.tasks.base import Trainable
from tarnn.training.evaluation import measure


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that are whole."""
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


def cut_log(path: Path, step: int) -> None:
    """Forget everything after `step`: a run that is resumed there writes it again."""
    kept = [line for line in read_log(path) if line["step"] <= step]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(partial, path)


class LogFile(TrainerCallback):
    """Appends to `path`, on the first process.

    Training: step, epoch, loss (nats per token, mean since the line before), bits_per_byte (the same, by the
    bytes per token of the whole training text), learning_rate, grad_norm, tokens seen, seconds.
    Evaluation: step, seconds, validation_loss, validation_bits_per_byte, validation_perplexity, and the rates that the
    task measures, such as validation_accuracy.

    The names are the task's: for images bits_per_dim (a value is a token, and a byte), and images, not
    tokens.
    """

    def __init__(self, path: Path, seconds: Callable[[], float], task: Trainable, per_step: int):
        self.path, self.seconds, self.task, self.per_step = path, seconds, task, per_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps:  # the last steps are logged too, however few there are
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs, task = logs or {}, self.task
        seen = state.global_step * self.per_step
        line = {"step": state.global_step, "epoch": round(seen / task.epoch, 6), "seconds": round(self.seconds(), 3)}
        if "loss" in logs:
            line[task.counted] = seen
            line["loss"] = logs["loss"]
            line[task.unit] = measure(logs["loss"], task)
            line |= {key: logs[key] for key in ("learning_rate", "grad_norm") if key in logs}
        elif "eval_loss" in logs:
            names = {"loss": "loss", task.unit: "measure", "perplexity": "perplexity"}
            names |= {name: name for name in task.rates}
            line |= {f"validation_{name}": logs[f"eval_{key}"] for name, key in names.items()}
        else:
            return
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


LINE_EVERY = 10.0  # seconds, without a terminal


class StatusLine(TrainerCallback):
    """Loss in bits per byte (or dimension), speed and time left, on stderr; each evaluation gets a line that stays.

    `fraction` says how much of the run is done, from 0 to 1; per_step: what a step counts, in the task's words. Only the
    first process shows anything.
    """

    def __init__(
        self,
        fraction: Callable[[int], float],
        seconds: Callable[[], float],
        task: Trainable,
        per_step: int,
        show: bool = True,
    ):
        self.fraction, self.seconds, self.task, self.per_step = fraction, seconds, task, per_step
        self.show = show
        self.unit = task.unit.replace("_per_", "/")
        self.bar: Any = None
        self.row: Any = None  # of the bar
        self.best = float("inf")
        self.text = ""
        self.last_line = 0.0
        self.since = (0, 0.0)  # step and seconds when this process began, and the part that was done
        self.part_before = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.since = (state.global_step, self.seconds())
        self.part_before = self.fraction(state.global_step)
        if self.show and sys.stderr.isatty():
            self.bar = make_bar()
            self.row = self.bar.add_task("", total=1.0, text="")
            self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        self.show_text(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.text = f"{measure(logs['loss'], self.task):.3f} {self.unit}"
            steps, seconds = state.global_step - self.since[0], self.seconds() - self.since[1]
            if seconds > 0:
                self.text += f"  {steps * self.per_step / seconds:,.0f} {self.task.counted}/s"
            last = control is not None and control.should_training_stop
            self.show_text(state.global_step, at_once=last or state.global_step == args.max_steps)

    def on_prediction_step(self, args, state, control, done=0, of=1, **kwargs):
        self.show_text(state.global_step, f"validation: {done:,} of {of:,} batches")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        now = (metrics or {}).get("eval_measure", float("inf"))
        mark = "  best so far" if now < self.best else ""
        self.best = min(self.best, now)
        rates = "".join(f", {name.replace('_', ' ')} {metrics[f'eval_{name}']:.4f}" for name in self.task.rates)
        self.say(f"step {state.global_step:,}: validation {now:.4f} {self.unit}{rates}{mark}")

    def show_text(self, step: int, text: str = "", at_once: bool = False) -> None:
        """Bring the bar up to date; without one, a line every ten seconds."""
        if not self.show:
            return
        part, now = min(1.0, self.fraction(step)), time.monotonic()
        text = text or (self.text and f"step {step:,}  {self.text}")
        line = f"{text}  {self.times(part)}"
        if self.bar is not None:
            self.bar.update(self.row, completed=part, text=line)
        elif text and (at_once or now - self.last_line > LINE_EVERY):
            self.last_line = now
            self.say(f"{100 * part:3.0f} %  {line}")

    def times(self, part: float) -> str:
        """'1:20 done, about 3:40 left', of what this process has to do."""
        seconds = self.seconds()
        text = f"{clock_time(seconds)} done"
        if part > self.part_before:
            left = (seconds - self.since[1]) * (1 - part) / (part - self.part_before)
            text += f", about {clock_time(left)} left"
        return text

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
    from rich.progress import BarColumn, Progress as Bar, TaskProgressColumn, TextColumn

    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
    return Bar(*columns, console=Console(stderr=True), refresh_per_second=4)
