"""One training run from its settings to a model in a folder: `train(TrainSettings(...))` is `tarnn train`.

Of the task (text, images) it asks what it reads, which model and trainer it takes, and how to speak of them; length,
time, log, checkpoints and resuming are the same for all. A task has

    name, unit, counted     under which name its facts are saved; of its measure; what progress counts
    epoch, bytes_per_token, validates, facts
    check(settings), per_step(args), steps_of(epochs, per_step), model(), trainer(**options), sample()
    run_facts(), rows(), step_row(per_step)        for settings.json and the table of settings
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, set_seed

from tarnn.attention.calibration import calibrated_layers
from tarnn.training import checkpoints
from tarnn.training.arguments import training_arguments
from tarnn.training.budget import Clock, TimeBudget
from tarnn.training.failures import full_disk_told
from tarnn.training.folder import CHECKPOINTS, LOG, claim, refuse_other_number, write_settings
from tarnn.training.image_task import ImageTask
from tarnn.training.log import LogFile, cut_log
from tarnn.training.progress import Progress
from tarnn.training.redraw import Redraw, random_maps
from tarnn.training.safe_trainer import SafeTrainer
from tarnn.training.settings import RunSettings
from tarnn.training.summary import describe, table
from tarnn.training.text_task import TextTask

FOREVER = 10**9  # steps, for a run that only the clock ends
TASKS: dict[str, Any] = {"text": TextTask, "image": ImageTask}
Task = TextTask | ImageTask


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. The measures are of the best model on held-out data; None without any.

    Of images, bits per byte are bits per dimension: a channel of a pixel is a byte.
    """

    out: Path
    steps: int
    seconds: float
    best_step: int | None
    bits_per_byte: float | None
    sample: str


def train(settings: RunSettings, show: bool = True) -> TrainResult:
    """Prepare the data, train, and leave in `settings.out` the best model, its log, checkpoints and a sample.

    Raises UserError for everything that the user can mend, a full disk and a loss that is not finite among
    them; what was complete before stays. `show`: tell on stderr what happens.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = TASKS[settings.task]
    kind.check(settings)
    args = training_arguments(settings)
    first = args.process_index == 0
    show = show and first
    with full_disk_told(settings.out):
        with args.main_process_first(local=False):
            saved = claim(settings) if first else None
            task = kind(settings, first, saved)
        set_seed(settings.seed)
        model = task.model()
        set_length(args, settings, task)
        facts = describe(args, task, model)
        if first:
            refuse_other_number(saved, facts)
            write_settings(settings.out, {"settings": settings.as_json(), **facts})
        if show:
            print(table(settings, facts, task), file=sys.stderr, flush=True)
        return run(settings, args, task, model, show)


def run(
    settings: RunSettings, args: TrainingArguments, task: Task, model: PreTrainedModel, show: bool
) -> TrainResult:
    """Train from the beginning, or from the last complete checkpoint where that was asked for."""
    clock = Clock()
    trainer = task.trainer(model=model, args=args, folder=settings.out, keep=settings.keep, clock=clock)
    per_step = task.per_step(args)
    if settings.max_minutes is not None:
        steps = args.max_steps if args.max_steps < FOREVER else None
        trainer.budget = TimeBudget(60 * settings.max_minutes, steps, clock)
        trainer.add_callback(trainer.budget)
    progress = Progress(
        lambda step: fraction_done(trainer, step), clock, per_step, task.bytes_per_token, show,
        unit=task.unit, counted=task.counted,
    )  # fmt: skip
    log = LogFile(
        settings.out / LOG, clock, per_step, task.epoch, task.bytes_per_token, unit=task.unit,
        counted=task.counted,
    )  # fmt: skip
    if random_maps(model) or calibrated_layers(model):
        trainer.add_callback(Redraw(settings.redraw_every, trainer.forward_on_examples))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(log)
    trainer.add_callback(progress)
    checkpoint = find_checkpoint(settings, args, progress)
    if checkpoint:
        trainer.run_state = checkpoints.read_state(checkpoint)
        progress.best = trainer.run_state.best_bits_per_byte or math.inf
    set_seed(settings.seed + args.process_index)  # dropout differs between processes
    clock.start(trainer.run_state.seconds)
    try:
        if trainer.budget is None or clock() < trainer.budget.limit:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    state = trainer.run_state
    text = task.sample() if args.process_index == 0 else ""
    return TrainResult(settings.out, state.step, clock(), state.best_step, state.best_bits_per_byte, text)


def fraction_done(trainer: SafeTrainer, step: int) -> float:
    return step / trainer.args.max_steps if trainer.budget is None else trainer.budget.progress


def find_checkpoint(settings: RunSettings, args: TrainingArguments, progress: Progress) -> Path | None:
    """The checkpoint to go on from, and the log cut back to it."""
    folder = settings.out / CHECKPOINTS
    checkpoint = checkpoints.latest(folder) if settings.resume else None
    step = checkpoints.read_state(checkpoint).step if checkpoint else -1
    with args.main_process_first(local=False):
        if args.process_index == 0:
            for place in (folder, settings.out):
                checkpoints.sweep(place)
            cut_log(settings.out / LOG, step)
    if settings.resume:
        progress.say(
            f"resuming from {checkpoint}" if checkpoint else "nothing to resume yet: from the beginning"
        )
    return checkpoint


def set_length(args: TrainingArguments, settings: RunSettings, task: Task) -> None:
    """Steps from epochs, and no evaluation where nothing is held out: known only now that the data are."""
    limits = [settings.steps] if settings.steps else []
    if settings.epochs is not None:
        limits.append(task.steps_of(settings.epochs, task.per_step(args)))
    args.max_steps = min(limits, default=FOREVER)
    if task.validates:
        args.eval_strategy = IntervalStrategy.STEPS
