"""A run that tunes the model of a folder, from its files to an adapter, or to a folder with all weights."""

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import set_seed

from tarnn.conversion.opening import open_pretrained, patch, read_config
from tarnn.data.tensor_file import flush
from tarnn.decoding.lm import tokenizer_in
from tarnn.errors import UserError
from tarnn.families.by_name import FAMILIES
from tarnn.huggingface.head_loss import head_with_loss
from tarnn.huggingface.patching.patch import known_layers
from tarnn.huggingface.wide import widen
from tarnn.log import Log
from tarnn.tasks.settings import held_out_count
from tarnn.tasks.text.pretrained import context_length
from tarnn.training import checkpoints
from tarnn.training.arguments import training_arguments
from tarnn.training.error_messages import failures_explained
from tarnn.training.folder import CHECKPOINTS, write_settings
from tarnn.training.run import TrainResult, run, set_length, take_folder
from tarnn.tuning.adapter import FILES, with_adapters, write_base
from tarnn.tuning.examples import Example, read_examples
from tarnn.tuning.memory import estimate, give_back_memory, refuse_too_much
from tarnn.tuning.packing import Counts, fitted
from tarnn.tuning.task import TuneSettings, TuneTask

LONGEST = 2048  # tokens of a row by default
HELD_OUT = 64  # examples, at most, unless a fraction was given
# softmax models that make logits of hidden states by lm_head alone
PLAIN = {model_type for model_type, file in FAMILIES.items() if file == "llama"}
LAST = "last"  # the folder of the latest adapter, within that of the best
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt")


@dataclass(frozen=True)
class Tuned:
    """Hold what a run left: its folder, and that of the latest adapter."""

    result: TrainResult
    last: Path | None


def tune(settings: TuneSettings, report: Log, show: bool = True) -> Tuned:
    """Train adapters, or all weights, of the model in `settings.folder`, and leave the best ones in `settings.out`.

    report: takes lines about what is to happen. show: show progress on stderr.

    Raises UserError for all that the user can mend; after Ctrl-C or SIGTERM, once it has saved, InterruptedRun.
    """
    started, folder = time.monotonic(), settings.folder
    args = training_arguments(settings)
    with failures_explained(settings.out), ExitStack() as stack:
        saved = take_folder(settings, stack)
        model = open_to_tune(folder, settings, report)
        task = make_task(settings, model, report)
        refuse_other_data(settings, saved, task)
        write_settings(settings.out, {"settings": settings.as_json(), "data": task.data_facts})
        base = model
        if settings.lora is not None:
            set_seed(settings.seed)
            alpha = settings.alpha or 2 * settings.lora
            model = with_adapters(model, settings.lora, alpha, str(folder))
        widen(model, base)
        set_length(args, settings, task)
        for name, value in rows_of(settings, task, model, args.max_steps).items():
            report(f"{name:>14}  {value}")
        say_cost(settings, task, model, base, args.max_steps, report)
        result = run(settings, args, task, model, show, started)
        last = None
        if settings.lora is not None:
            write_base(settings.out, folder)
            last = keep_last(settings.out, folder)
        else:
            copy_tokenizer(folder, settings.out)
        return Tuned(result, last)


def refuse_other_data(settings: TuneSettings, saved: dict[str, Any] | None, task: TuneTask) -> None:
    """Raise UserError where a run is resumed and its data are not what they were."""
    if saved is not None and saved.get("data") not in (None, task.data_facts):
        raise UserError(
            f"the data are no longer those that the run in {settings.out} began with; restore them to --resume, or start again "
            "with --overwrite."
        )


def open_to_tune(folder: Path, settings: TuneSettings, report: Log) -> Any:
    """Open the text model of a folder to train it; what computes it, where that is not tarnn, is said."""
    give_back_memory()
    fields_to_tune(folder)
    model = open_pretrained(folder, text_only=True, report=report)
    if model.get_output_embeddings() is None:
        raise UserError(f"{folder} holds a {type(model).__name__}; expected a language model.")
    if settings.kind == "full":
        model.float()
    compute_experts(model)
    refusals = list[str]()
    patch(model, refusals.append)
    if refusals and settings.pack:
        raise UserError(
            f"{refusals[0]} Without tarnn's layers packed rows would leak into each other. Give --no-packing."
        )
    for line in refusals:
        report(line)
    if not any(known_layers(model)):
        report("its backward is torch's own: this model has no linear layers that tarnn computes")
        if model.config.model_type in PLAIN:  # as tarnn hooks those that it computes
            model.forward = MethodType(head_with_loss(type(model).forward), model)
    return model


def fields_to_tune(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json of a model that can be tuned; UserError for what tarnn runs and does not tune."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; expected a folder of transformers. Give the one that it was packed from.")
    fields = read_config(folder)
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind.startswith("tarnn"):
        raise UserError(
            f"{folder} holds a model of tarnn's own; expected one of transformers. `tarnn train` trains it."
        )
    if kind == "rwkv7":
        raise UserError(
            f"{folder} holds RWKV-7, which transformers lacks, so it runs and can't be tuned. Take another family."
        )
    return fields


def compute_experts(model: Any) -> None:
    """Let experts be computed one by one where torch's grouped product refuses their rows, which must be of whole 16 bytes."""
    experts = [x for name, x in model.named_parameters() if ".experts." in name and x.ndim == 3]
    if any(size * x.element_size() % 16 for x in experts for size in x.shape[1:]):
        model.set_experts_implementation("eager")


def make_task(settings: TuneSettings, model: Any, report: Log) -> TuneTask:
    """Read the data, cut them to rows, and hold some out."""
    tokenizer = tokenizer_in(settings.folder, model.config.vocab_size)
    ends = getattr(model.generation_config, "eos_token_id", None)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0] if isinstance(ends, list) else ends
    read = partial(read_examples, tokenizer=tokenizer, vocab_size=model.config.vocab_size, log=report, end=end)
    counts = Counts()
    examples = fitted(read(settings.sources), settings.length, counts)
    held_out: list[Example] = []
    if settings.val is not None:
        held_out = fitted(read([settings.val]), settings.length, counts)
    elif number := held_out_count(len(examples), settings.val_fraction, HELD_OUT):
        order = np.random.default_rng([settings.seed, 1]).permutation(len(examples))
        held_out = [examples[i] for i in sorted(order[:number])]
        examples = [examples[i] for i in sorted(order[number:])]
    for line in counts.lines(settings.length):
        report(line)
    if not examples:
        raise UserError(f"{', '.join(settings.sources)} have no example with a token to learn; expected one at least.")
    return TuneTask(examples, held_out, settings.length, settings.pack)


def positions_of(fields: dict[str, Any]) -> int | None:
    """Return how many tokens a model reads, by its config.json; None: any number, or not said."""
    most = (fields.get("text_config") or fields).get("max_position_embeddings")
    return most if isinstance(most, int) else None


def row_length(most: int | None, requested: int | None) -> int:
    """Return the tokens of a row: as requested, or as many as the model reads, up to LONGEST."""
    length = context_length(most, requested)
    return min(LONGEST, length) if requested is None else length


def rows_of(settings: TuneSettings, task: TuneTask, model: Any, steps: int) -> dict[str, str]:
    """Say what is to happen, by topic."""
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    kind = f"adapters of rank {settings.lora}" if settings.lora else "all weights"
    of_model = sum(x.numel() for x in model.parameters()) - (trained if settings.lora else 0)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "model": f"{settings.folder}: {of_model:,} parameters, {dtype}",
        "trained": f"{kind}: {trained:,} parameters",
        "data": task.summary(settings),
        "length": f"{steps:,} steps of {settings.accumulate} rows, learning rate {settings.learning_rate:g}",
        "threads": f"{torch.get_num_threads()}",
    }


def say_cost(settings: TuneSettings, task: TuneTask, model: Any, base: Any, steps: int, report: Log) -> None:
    """Report the memory and the time that a run will take; UserError where there is less memory."""
    cost = estimate(model, base, task.longest, settings.gradient_checkpointing)
    report(f"{'memory':>14}  {cost.memory}")
    tokens = min(steps * settings.accumulate, 10**9) * task.per_example
    limits = [cost.seconds * tokens / 60, *([settings.max_minutes] if settings.max_minutes else [])]
    report(f"{'time':>14}  about {min(limits):,.1f} minutes without validation")
    refuse_too_much(cost, settings.gradient_checkpointing)


def keep_last(out: Path, base: Path) -> Path | None:
    """Copy the adapter of the latest checkpoint to a folder of its own."""
    latest = checkpoints.latest(out / CHECKPOINTS)
    if latest is None:
        return None
    last = out / LAST
    last.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(latest / name, last / name)
        flush(last / name)
    write_base(last, base)
    return last


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy what reads and writes text beside weights that were trained."""
    for path in sorted({x for pattern in TOKENIZER for x in folder.glob(pattern) if x.is_file()}):
        shutil.copyfile(path, out / path.name)
