"""The log of a run: one JSON object per line, one for every few steps of training and one for each evaluation."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tarnn.tasks.base import Trainable
from tarnn.training.metrics import measure


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
