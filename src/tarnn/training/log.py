"""The log of a run: a JSON object a line, one for each few steps of training and one for each evaluation."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tarnn.training.metrics import bits_per_byte


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

    Training: step, epoch, loss (nats a token, mean since the line before), bits_per_byte (the same, by the
    bytes per token of the whole training text), learning_rate, grad_norm, tokens seen, seconds.
    Evaluation: step, seconds, validation_loss, validation_bits_per_byte, validation_perplexity.

    Of images, `unit` is bits_per_dim (a value is a token, and a byte), and images are `counted`, not tokens.
    """

    def __init__(
        self,
        path: Path,
        seconds: Callable[[], float],
        tokens_per_step: int,
        tokens: int,
        bytes_per_token: float,
        *,
        unit: str = "bits_per_byte",
        counted: str = "tokens",
    ):
        self.path = path
        self.seconds = seconds
        self.tokens_per_step, self.tokens, self.bytes_per_token = tokens_per_step, tokens, bytes_per_token
        self.unit, self.counted = unit, counted

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        seen = state.global_step * self.tokens_per_step
        line = {
            "step": state.global_step,
            "epoch": round(seen / self.tokens, 6),
            "seconds": round(self.seconds(), 3),
        }
        if "loss" in logs:
            line[self.counted] = seen
            line["loss"] = logs["loss"]
            line[self.unit] = bits_per_byte(logs["loss"], self.bytes_per_token)
            line |= {key: logs[key] for key in ("learning_rate", "grad_norm") if key in logs}
        elif "eval_loss" in logs:
            names = {"loss": "loss", self.unit: "bits_per_byte", "perplexity": "perplexity"}
            line |= {f"validation_{name}": logs[f"eval_{key}"] for name, key in names.items()}
        else:
            return
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
