"""Tuning as a task of the training loop: its settings, its rows, its loss."""

import hashlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from tarnn.huggingface.head_loss import losses_alone
from tarnn.huggingface.patching.packed import packed_step
from tarnn.numerics import widest
from tarnn.tasks import RunSettings
from tarnn.tasks.base import Trainable
from tarnn.tasks.settings import LENGTH, option
from tarnn.tasks.text.windows import IGNORED
from tarnn.tuning.examples import Example
from tarnn.tuning.packing import PackedRows, bounds_of

RATES = {"lora": 2e-4, "full": 1e-5, "state": 1e-2}
EPOCHS = 3


@dataclass(frozen=True)
class TuneSettings(RunSettings):
    """Options of a run that tunes a model of a folder. lora: the rank of adapters; None: all weights are trained."""

    task: ClassVar[str] = "finetune"

    folder: Path = field(default=Path())
    kind: str = "lora"
    lora: int | None = option(None, "The rank of the adapters.", LENGTH, least=1, most=4096)
    alpha: float | None = option(None, "The adapters' alpha (default: twice the rank).", LENGTH, above=0)
    length: int = option(2048, "Tokens per row.", LENGTH, least=2, most=2**24)
    pack: bool = True

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_minutes is None:
            object.__setattr__(self, "epochs", EPOCHS)
        super().__post_init__()

    @property
    def usual_learning_rate(self) -> float:
        return RATES[self.kind]

    @property
    def recipe(self) -> dict[str, Any]:
        """No weight decay, and β₂ of a short run."""
        return {"weight_decay": 0.0, "adam_beta2": 0.999, "warmup_steps": 0.03}


class AtTheEnd(TrainerCallback):
    """Validates after the last step, too."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True


class TuneTask(Trainable):
    """Packed rows of examples; the loss is the mean over the tokens that are learned, of all rows of a step alike."""

    unit, bytes_per_token, targets = "nats_per_token", None, "labels"

    def __init__(self, examples: list[Example], held_out: list[Example], length: int, pack: bool):
        self.examples = PackedRows(examples, length, pack)
        self.held_out = PackedRows(held_out, length, pack) if held_out else None
        self.num_tokens = sum(len(x.ids) for x in examples)
        self.num_learned = sum(int(x.learned[1:].sum()) for x in examples)
        self.per_example = max(1, self.num_tokens // len(self.examples))
        self.epoch = self.per_example * len(self.examples)
        self.longest = max(x.num_tokens for x in (self.examples, self.held_out) if x is not None)

    @property
    def data_facts(self) -> dict[str, Any]:
        """Return what tells these data from others."""
        digest = hashlib.sha256()
        for rows in (self.examples, self.held_out):
            for x in rows.examples if rows is not None else ():
                digest.update(x.ids.tobytes() + x.learned.tobytes())
        return {"examples": len(self.examples.examples), "tokens": self.num_tokens, "sha256": digest.hexdigest()}

    def summary(self, settings: TuneSettings) -> str:
        """Describe the data."""
        held = "none held out" if self.held_out is None else f"{len(self.held_out.examples):,} held out"
        rows = (
            f"{len(self.examples):,} {'packed rows' if settings.pack else 'rows'} of up to {settings.length:,} tokens"
        )
        tokens = f"{self.num_tokens:,} tokens, {self.num_learned:,} of them learned"
        return f"{len(self.examples.examples):,} examples ({held}), {tokens}; {rows}"

    @staticmethod
    def collate(rows: Any) -> dict[str, Tensor]:
        """One row; more are accumulated, so that none is padded."""
        (row,) = rows
        return {**row, "use_cache": False}

    def within_step(self, batch: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """Let layers that are not told find where sequences begin, in backward too."""
        return packed_step(bounds_of(batch["position_ids"]))

    def validation(self, batch_size: int) -> Any:
        return None if self.held_out is None else [self.collate([row]) for row in self.held_out]

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """(nats, learned tokens, their number again in the unit of `measures`)."""
        with losses_alone(), self.within_step(batch):
            loss = model(**batch)["loss"]
        count = (batch["labels"] != IGNORED).sum().to(widest(loss.device))
        return torch.stack([loss.to(count.dtype) * count, count, count / math.log(2)]), []

    def trainer_options(self, args: TrainingArguments) -> dict[str, Any]:
        return {"callbacks": [AtTheEnd()]}
