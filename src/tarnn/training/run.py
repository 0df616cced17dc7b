"""One training run from its settings to a model in a folder: `train(TrainSettings(...))` is `tarnn train`."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, set_seed

from tarnn.data.corpus import DESCRIPTION, Corpus, Digest, load, prepare
from tarnn.data.sources import read_documents
from tarnn.data.windows import Windows
from tarnn.errors import UserError
from tarnn.models import TarnnForCausalLM
from tarnn.training import checkpoints
from tarnn.training.arguments import training_arguments
from tarnn.training.budget import Clock, TimeBudget
from tarnn.training.failures import full_disk_told
from tarnn.training.folder import CHECKPOINTS, DATA, LOG, claim, refuse_other_number, write_settings
from tarnn.training.log import LogFile, cut_log
from tarnn.training.model import model_config
from tarnn.training.progress import Progress
from tarnn.training.sample import write_sample
from tarnn.training.settings import TrainSettings
from tarnn.training.summary import describe, table
from tarnn.training.trainer import TextTrainer

FOREVER = 10**9  # steps, for a run that only the clock ends


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. The measures are of the best model on the validation text; None without one."""

    out: Path
    steps: int
    seconds: float
    best_step: int | None
    bits_per_byte: float | None
    sample: str


def train(settings: TrainSettings, show: bool = True) -> TrainResult:
    """Prepare the text, train, and leave in `settings.out` the best model, its log, checkpoints and a sample.

    Raises UserError for everything that the user can mend, a full disk and a loss that is not finite among
    them; what was complete before stays. `show`: tell on stderr what happens.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model_config(settings)
    args = training_arguments(settings)
    first = args.process_index == 0
    show = show and first
    with full_disk_told(settings.out):
        with args.main_process_first(local=False):
            saved = claim(settings) if first else None
            corpus = ready_corpus(settings, first)
        windows = Windows(corpus.train, settings.context)
        set_seed(settings.seed)
        model = TarnnForCausalLM(model_config(settings, corpus.tokenizer))
        set_length(args, settings, corpus)
        facts = describe(args, corpus, windows, model)
        if first:
            refuse_other_number(saved, facts)
            write_settings(settings.out, {"settings": settings.as_json(), **facts})
        if show:
            print(table(settings, facts), file=sys.stderr, flush=True)
        return run(settings, args, corpus, windows, model, show)


def run(
    settings: TrainSettings, args: TrainingArguments, corpus: Corpus, windows: Windows,
    model: TarnnForCausalLM, show: bool,
) -> TrainResult:  # fmt: skip
    """Train from the beginning, or from the last complete checkpoint where that was asked for."""
    clock = Clock()
    trainer = TextTrainer(
        model=model, args=args, corpus=corpus, windows=windows, folder=settings.out, keep=settings.keep,
        clock=clock,
    )  # fmt: skip
    tokens = tokens_per_step(args, settings)
    if settings.max_minutes is not None:
        steps = args.max_steps if args.max_steps < FOREVER else None
        trainer.budget = TimeBudget(60 * settings.max_minutes, steps, clock)
        trainer.add_callback(trainer.budget)
    progress = Progress(
        lambda step: fraction_done(trainer, step), clock, tokens, corpus.bytes_per_token, show
    )
    log = LogFile(settings.out / LOG, clock, tokens, len(corpus.train), corpus.bytes_per_token)
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
    text = ""
    if args.process_index == 0:
        text = write_sample(settings.out, corpus.tokenizer, settings.seed, settings.sample_tokens)
    return TrainResult(settings.out, state.step, clock(), state.best_step, state.best_bits_per_byte, text)


def fraction_done(trainer: TextTrainer, step: int) -> float:
    return step / trainer.args.max_steps if trainer.budget is None else trainer.budget.progress


def find_checkpoint(settings: TrainSettings, args: TrainingArguments, progress: Progress) -> Path | None:
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


def ready_corpus(settings: TrainSettings, first: bool) -> Corpus:
    """The text as ids: prepared, or as an interrupted run left it if the sources still say the same.

    The `first` process reads the sources; others find what it has written.
    """
    folder = settings.out / DATA
    documents = read_documents(settings.sources, text_field=settings.text_field)
    held_out = None
    if settings.val is not None:
        held_out = read_documents([settings.val], text_field=settings.text_field)
    if not (folder / DESCRIPTION).exists():
        return prepare(
            documents, folder, tokenizer=settings.tokenizer, validation_fraction=settings.val_fraction,
            validation_documents=held_out,
        )  # fmt: skip
    corpus = load(folder)
    if first and not (
        Digest(documents).hex() == corpus.facts["digest"]
        and (held_out is None or Digest(held_out).hex() == corpus.facts["validation"]["digest"])
    ):
        raise UserError(
            f"the text of {', '.join(settings.sources)} is no longer what the run in {settings.out} began "
            "with; restore it to --resume, or start again with --overwrite."
        )
    return corpus


def set_length(args: TrainingArguments, settings: TrainSettings, corpus: Corpus) -> None:
    """Steps from epochs, and no evaluation where nothing is held out: known only now that the text is."""
    limits = [settings.steps] if settings.steps else []
    if settings.epochs is not None:
        limits.append(
            max(1, math.ceil(settings.epochs * len(corpus.train) / tokens_per_step(args, settings)))
        )
    args.max_steps = min(limits, default=FOREVER)
    if len(corpus.validation) > 1:
        args.eval_strategy = IntervalStrategy.STEPS


def tokens_per_step(args: TrainingArguments, settings: TrainSettings) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size * settings.context
