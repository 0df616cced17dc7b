"""The training loop of a conversion: that of `tarnn train`, with its checkpoints, log, progress and stops."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tarnn.conversion.distil import Distillation
from tarnn.data.examples import EpochSampler
from tarnn.tasks import Facts
from tarnn.training import checkpoints
from tarnn.training.budget import Clock
from tarnn.training.error_messages import failures_explained
from tarnn.training.folder import CHECKPOINTS, LOG
from tarnn.training.interruption import InterruptedRun, Interruption
from tarnn.training.lock import locked
from tarnn.training.log import LogFile, cut_log
from tarnn.training.new_folder import nothing_or_a_checkpoint
from tarnn.training.progress import Progress
from tarnn.training.safe_trainer import SafeTrainer


class Rows:
    """Rows of ids, as `SafeTrainer` takes them; the loss is the distillation's own."""

    tokenizer, rates, has_sample = None, (), False

    def __init__(self, rows: list[dict[str, Tensor]]):
        self.examples = rows

    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        return EpochSampler(len(self.examples), num_examples, seed)

    def collate(self, rows: Any, /) -> dict[str, Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def validation(self, batch_size: int) -> Sequence[dict[str, Tensor]] | None:
        return None

    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found = model(**batch)
        return found["loss"], found

    def sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        raise AssertionError("nothing is held out here: `Check` measures")

    def trainer_options(self, args: TrainingArguments) -> dict[str, Any]:
        return {}


class DistillationTrainer(SafeTrainer):
    """The converted model is saved whole, when all is done: a checkpoint has only what is trained."""

    def save_best(self) -> None: ...


def fit(
    loss: Distillation,
    data: list[dict[str, Tensor]],
    steps: int,
    batch_size: int,
    learning_rate: float,
    out: Path | None,
    resume: bool,
    seed: int,
) -> None:
    """AdamW, gradients clipped at 1, a linear fall after a short rise. Without `out` nothing is shown, and nothing kept."""
    with nullcontext(out) if out else TemporaryDirectory() as place:
        folder = Path(place)
        with nothing_or_a_checkpoint(folder), failures_explained(folder), locked(folder):
            run(
                loss,
                data,
                arguments(loss, folder, steps, batch_size, learning_rate, seed, out),
                folder,
                resume,
                show=out is not None,
            )


def arguments(
    loss: Distillation, folder: Path, steps: int, batch_size: int, learning_rate: float, seed: int, out: Path | None
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=min(10, steps // 10),
        max_grad_norm=1.0,
        weight_decay=0.0,
        seed=seed,
        logging_steps=max(1, steps // 20),
        logging_nan_inf_filter=False,
        save_strategy="steps" if out else "no",
        save_steps=max(1, steps // 10),
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        log_level="error",
        use_cpu=next(loss.parameters()).device.type == "cpu",
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def run(
    loss: Distillation,
    data: list[dict[str, Tensor]],
    args: TrainingArguments,
    folder: Path,
    resume: bool,
    *,
    show: bool,
) -> None:
    trainer = DistillationTrainer(
        task=Rows(data), model=loss, args=args, folder=folder, keep=2, clock=Clock(), interruption=Interruption(show)
    )
    length = data[0]["input_ids"].shape[0]
    # of the loss, which is no number of bits
    facts = Facts("loss", "tokens", args.train_batch_size * length, len(data) * length, 1 / math.log(2))
    progress = Progress(lambda step: step / args.max_steps, trainer.clock, facts, show)
    checkpoint = checkpoints.latest(folder / CHECKPOINTS) if resume else None
    if checkpoint:
        trainer.run_state = checkpoints.read_state(checkpoint)
    for place in (folder, folder / CHECKPOINTS):
        checkpoints.sweep(place)
    cut_log(folder / LOG, trainer.run_state.step if checkpoint else -1)
    if resume:
        progress.say(f"resuming from {checkpoint}" if checkpoint else "nothing to resume yet: from the beginning")
    trainer.remove_callback(PrinterCallback)
    for callback in (trainer.interruption, LogFile(folder / LOG, trainer.clock, facts), progress):
        trainer.add_callback(callback)
    try:
        with trainer.interruption.watched():
            trainer.clock.start(trainer.run_state.seconds)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    if signal := trainer.interruption.signal:
        raise InterruptedRun(signal, trainer.run_state.step, checkpoints.latest(folder / CHECKPOINTS))
