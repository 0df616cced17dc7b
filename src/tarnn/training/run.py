"""One training run from its settings to a model in a folder: `train(TextSettings(...))` is `tarnn train`.

What is trained for is the task's to say (`tarnn.tasks`); length, time, log, checkpoints and resuming are the same for all.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, set_seed

from tarnn._version import __version__
from tarnn.attention.calibration import calibrated_layers
from tarnn.errors import UserError
from tarnn.matmul import LEAST, fast_matmul, product_size, refusal
from tarnn.parallel.agreement import check_alike
from tarnn.tasks import TASKS, RunSettings
from tarnn.tasks.base import Sample, Trainable
from tarnn.training import checkpoints
from tarnn.training.arguments import refuse_too_large, training_arguments
from tarnn.training.budget import Clock, TimeBudget
from tarnn.training.callbacks import InterruptedRun, Interruption, Redraw, random_maps
from tarnn.training.error_messages import assignments_blamed, failures_explained
from tarnn.training.folder import CHECKPOINTS, LOG, claim, locked, refuse_stranger, write_settings
from tarnn.training.log import LogFile, StatusLine, cut_log, read_log
from tarnn.training.model_card import card_of_run, write_card
from tarnn.training.processes import distributed, everywhere, refuse_disagreement, shared
from tarnn.training.safe_trainer import SafeTrainer
from tarnn.training.summary import describe, table

FOREVER = 10**9  # steps, for a run that only the clock ends
USUAL_LENGTH = 256  # tokens of an example, where examples differ in length
BF16_UNUSED = "this processor multiplies bfloat16, which --bf16 would use: a step is faster, with less exact products"


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run: of its best model on held-out data; None without any."""

    out: Path
    steps: int
    seconds: float
    best_step: int | None
    validation: float | None  # the measure, in the unit of the task
    sample: Sample | None
    rates: dict[str, float] = field(default_factory=dict)  # of the same validation: accuracy …
    example: str = ""  # an input that `tarnn predict` takes


def train(settings: RunSettings, show: bool = True, started: float | None = None) -> TrainResult:
    """Prepare the data, train, and leave in `settings.out` the best model, its log, checkpoints and a sample.

    show: say on stderr what happens. started: when the command began, by time.monotonic(); now, if None.

    Raises UserError for everything that the user can mend, a full disk and a loss that is not finite among
    them; what was complete before stays. After Ctrl-C or SIGTERM: saves, and raises InterruptedRun. Where several
    processes train, what stops one of them stops all.
    """
    started = time.monotonic() if started is None else started
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = TASKS[settings.task]
    kind.check(settings)
    args = training_arguments(settings)
    first = args.process_index == 0
    show = show and first

    def report(line: str) -> None:
        if show:
            print(line, file=sys.stderr, flush=True)

    with failures_explained(settings.out), ExitStack() as stack:
        refuse_disagreement("settings", {"tarnn": __version__, **settings.as_json()})
        saved = everywhere(lambda: take_folder(settings, stack) if first else None)
        here = keep_step(args, settings, saved)
        # the first process reads and prepares the data; the others find them prepared
        ready = everywhere(lambda: kind(here, True, saved, report) if first else None)
        task = everywhere(lambda: ready or kind(here, False, None, report))
        everywhere(lambda: refuse_too_large(task, args))
        refuse_disagreement("data", task.data_facts)
        set_seed(settings.seed)
        model = task.model()
        if distributed():
            check_alike(model)
        set_length(args, settings, task)
        size = typical_size(args, task, model)
        products = refusal(size) or "oneDNN in float32"
        described = describe(args, task, step_size(settings, task, args), model, products)
        if first:
            write_settings(settings.out, {"settings": settings.as_json(), **described})
        report(table(here, described, task))
        if not settings.bf16 and args.device.type == "cpu" and size >= LEAST and multiplies_bfloat16():
            report(f"tarnn: {BF16_UNUSED}")
        return run(settings, args, task, model, show, started, partial(card_of_run, here, task, model, described))


def take_folder(settings: RunSettings, stack: ExitStack) -> dict[str, Any] | None:
    """Lock the run's folder until the stack is closed, and make it this run's; return what a resumed run saved there."""
    refuse_stranger(settings.out)
    stack.enter_context(locked(settings.out))
    return claim(settings)


def keep_step(args: TrainingArguments, settings: RunSettings, saved: dict[str, Any] | None) -> RunSettings:
    """Let the steps of a run that is resumed have as many examples as before, on any number of processes.

    Batches become smaller, or more of them are accumulated, so that losses and gradients stay what they were, up to
    rounding. `saved` is read on the first process. UserError where the processes can't share a step's examples equally.
    """
    begun = (saved or {}).get("run", {})
    usual = settings.batch_size * settings.accumulate
    examples = int(shared(begun.get("examples_per_step") or usual * begun.get("processes", 0))[0])
    processes = args.world_size
    if examples in (0, usual * processes):
        return settings
    if examples % processes:
        raise UserError(
            f"a step of this run has {examples} examples, which {processes} processes can't share equally; resume it with "
            f"a number of processes that divides {examples}."
        )
    each = examples // processes
    accumulate = next(n for n in range(-(-each // settings.batch_size), each + 1) if each % n == 0)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = each // accumulate, accumulate
    return replace(settings, batch_size=each // accumulate, accumulate=accumulate)


def step_size(settings: RunSettings, task: Trainable, args: TrainingArguments) -> int:
    """Return what a step of all processes counts: tokens, images."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size * task.per_example


def typical_size(args: TrainingArguments, task: Trainable, model: nn.Module) -> float:
    """Return the multiplications of a typical product in a training step."""
    length = getattr(getattr(model, "config", None), "sequence_length", USUAL_LENGTH)
    length = task.per_example if task.counted == "tokens" else length
    return product_size(model, args.train_batch_size * length)


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16 (known on x86 alone)."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def run(
    settings: RunSettings,
    args: TrainingArguments,
    task: Trainable,
    model: nn.Module,
    show: bool,
    started: float,
    card: Callable[[checkpoints.RunState, dict[str, float]], str] | None = None,
) -> TrainResult:
    """Train from the beginning, or from the last complete checkpoint where that was asked for.

    card: makes the text of the model card, of the state at the end and the rates of the best validation.
    """
    trainer: SafeTrainer | None = None
    with assignments_blamed(settings, lambda: trainer is not None and trainer.has_stepped):
        trainer = SafeTrainer(
            task=task,
            model=model,
            args=args,
            folder=settings.out,
            keep=settings.keep,
            clock=Clock(),
            interruption=Interruption(show),
        )
        size = step_size(settings, task, args)
        status = StatusLine(lambda step: fraction_done(trainer, step), trainer.clock, task, size, show)
        checkpoint = find_checkpoint(settings, args, status)
        if checkpoint:
            trainer.run_state = checkpoints.read_state(checkpoint)
            status.best = trainer.run_state.best_measure or math.inf
        add_callbacks(trainer, settings, status)
        set_seed(settings.seed + args.process_index)  # dropout differs between processes
        with fast_matmul(typical_size(args, task, model)):
            fit(trainer, checkpoint, status, started)
    state, signal = trainer.run_state, trainer.interruption.signal
    rates = best_rates(settings.out / LOG, state.best_step, task.rates)
    if args.process_index == 0 and card is not None:
        write_card(settings.out, card(state, rates))
    if signal:
        raise InterruptedRun(signal, state.step, checkpoints.latest(settings.out / CHECKPOINTS))
    sample = sample_of(task, trainer.budget, show) if args.process_index == 0 else None
    return TrainResult(
        settings.out, state.step, state.seconds, state.best_step, state.best_measure, sample, rates, task.example
    )


def sample_of(task: Trainable, budget: TimeBudget | None, show: bool) -> Sample | None:
    """Let the trained model make something; None, with a line on stderr, where that fails: all that was trained is saved."""
    try:
        return task.sample(None if budget is None else max(1.0, budget.left()))
    except Exception as error:
        if os.environ.get("TARNN_TRACEBACK"):
            raise
        if show:
            reason = " ".join(str(error).split())[:200]
            print(
                f"tarnn: the run is complete and saved, but its model made no sample ({type(error).__name__}: {reason}); "
                "TARNN_TRACEBACK=1 with --resume shows where it failed",
                file=sys.stderr,
            )
        return None


def best_rates(log: Path, step: int | None, names: tuple[str, ...]) -> dict[str, float]:
    """The rates that the validation at that step measured."""
    keys = {name: f"validation_{name}" for name in names}
    lines = (line for line in read_log(log) if line["step"] == step and keys and set(keys.values()) <= set(line))
    return {name: line[key] for line in lines for name, key in keys.items()}


def add_callbacks(trainer: SafeTrainer, settings: RunSettings, status: StatusLine) -> None:
    """Add what happens between steps: time and validation, draws, signals, the log, the progress bar."""
    args, model = trainer.args, cast(nn.Module, trainer.model)
    if trainer.batches is not None:
        args.eval_strategy = IntervalStrategy.STEPS
    if settings.max_minutes is not None:
        steps = args.max_steps if args.max_steps < FOREVER else None
        trainer.budget = TimeBudget(60 * settings.max_minutes, steps, trainer.clock, trainer.task.has_sample)
        trainer.add_callback(trainer.budget)
    if random_maps(model) or calibrated_layers(model):
        trainer.add_callback(Redraw(settings.redraw_every, trainer.forward_on_examples))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(trainer.interruption)
    trainer.add_callback(LogFile(settings.out / LOG, trainer.clock, trainer.task, status.per_step))
    trainer.add_callback(status)


def fit(trainer: SafeTrainer, checkpoint: Path | None, status: StatusLine, started: float) -> None:
    """The training itself. A run whose time is over already has nothing left to do."""
    budget, before = trainer.budget, trainer.run_state.seconds
    if budget is not None and before >= budget.limit:
        return
    try:
        with trainer.interruption.watched():
            trainer.prepare_validation(status.say)
            trainer.clock.start(before)
            if budget is not None:
                budget.begin(time.monotonic() - started)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        status.close()


def fraction_done(trainer: SafeTrainer, step: int) -> float:
    """How much of the run is done: by the clock where that ends it, else by the steps."""
    budget = trainer.budget
    if budget is None:
        return step / trainer.args.max_steps
    return max(1 - budget.left() / budget.whole, step / budget.max_steps if budget.max_steps else 0.0)


def find_checkpoint(settings: RunSettings, args: TrainingArguments, status: StatusLine) -> Path | None:
    """The checkpoint to go on from, and the log cut back to it."""
    folder = settings.out / CHECKPOINTS
    checkpoint = checkpoints.latest(folder) if settings.resume else None
    refuse_disagreement("checkpoints", {"the latest": checkpoint and checkpoint.name})
    step = everywhere(lambda: checkpoints.read_state(checkpoint).step if checkpoint else -1)

    def clean() -> None:
        for place in (folder, settings.out):
            checkpoints.sweep(place)
        cut_log(settings.out / LOG, step)

    everywhere(clean if args.process_index == 0 else lambda: None)
    if settings.resume:
        status.say(f"resuming from {checkpoint}" if checkpoint else "nothing to resume yet: from the beginning")
    return checkpoint


def set_length(args: TrainingArguments, settings: RunSettings, task: Trainable) -> None:
    """Steps, also from epochs: known only now that the data are."""
    limits = [settings.steps] if settings.steps else []
    if settings.epochs is not None:
        limits.append(max(1, math.ceil(min(settings.epochs * task.epoch / step_size(settings, task, args), FOREVER))))
    args.max_steps = min(limits, default=FOREVER)
