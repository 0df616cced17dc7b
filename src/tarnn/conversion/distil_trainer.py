"""The training of a conversion: a run of `tarnn train`'s loop, with its checkpoints, log, progress and stops."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers.trainer_utils import SaveStrategy

from tarnn.conversion.distil import Distillation
from tarnn.tasks import RunSettings
from tarnn.tasks.base import Trainable
from tarnn.training.arguments import training_arguments
from tarnn.training.error_messages import failures_explained
from tarnn.training.folder import locked
from tarnn.training.run import run


@dataclass(frozen=True)
class DistillationSettings(RunSettings):
    task = "distillation"

    @property
    def recipe(self) -> dict[str, Any]:
        """A linear decay after a short warm-up."""
        assert self.steps is not None
        warmup = min(10, self.steps // 10)
        return {"lr_scheduler_type": "linear", "warmup_steps": warmup, "weight_decay": 0.0, "adam_beta2": 0.999}


class DistillationTask(Trainable):
    """Rows of ids; the loss is the model's own. A checkpoint has only what is trained, so no model is kept on the way."""

    unit, bytes_per_token, keeps_model = "loss", None, False

    def __init__(self, rows: list[dict[str, Tensor]]):
        self.examples = rows
        self.per_example = len(rows[0]["input_ids"])
        self.epoch = len(rows) * self.per_example


def distil(
    losses: Distillation,
    rows: list[dict[str, Tensor]],
    steps: int,
    batch_size: int,
    learning_rate: float,
    out: Path | None,
    resume: bool,
    seed: int,
) -> None:
    """Train what `losses` names, with AdamW and gradients clipped at 1. Without `out` nothing is shown and nothing kept."""
    with nullcontext(out) if out else TemporaryDirectory() as place:
        settings = DistillationSettings(
            sources=(),
            out=Path(place),
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            save_every=max(1, steps // 10),
            device="cpu" if next(losses.parameters()).device.type == "cpu" else "auto",
            seed=seed,
            resume=resume,
        )
        args, task = training_arguments(settings), DistillationTask(rows)
        args.max_steps = steps
        if out is None:
            args.save_strategy = SaveStrategy.NO
        with failures_explained(settings.out), locked(settings.out):
            run(settings, args, task, losses, out is not None, time.monotonic())
