"""Make the TrainingArguments of a run (`--set key=value` for all that has no option), and refuse models that are too large."""

import dataclasses
import os
from difflib import get_close_matches
from types import NoneType
from typing import Any, cast, get_args, get_origin

import psutil
import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode

from tarnn.errors import UserError
from tarnn.tasks import RunSettings, Task
from tarnn.training.budget import FLOOR, WARMUP

# what has an option of its own, or what the run depends on being as it is
OWN = {
    "output_dir": "--out",
    "learning_rate": "--learning-rate",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--accumulate",
    "max_steps": "--steps",
    "num_train_epochs": "--epochs",
    "seed": "--seed",
    "data_seed": "--seed",
    "bf16": "--bf16",
    "gradient_checkpointing": "--gradient-checkpointing",
    "activation_checkpointing": "--gradient-checkpointing",
    "eval_steps": "--eval-every",
    "save_steps": "--save-every",
    "save_total_limit": "--keep",
    "resume_from_checkpoint": "--resume",
    "eval_strategy": "--eval-every and --val-fraction",
    "save_strategy": "--save-every",
    "logging_steps": "--save-every",
    "logging_strategy": "--save-every",
}
FIXED = {
    "remove_unused_columns",
    "load_best_model_at_end",
    "metric_for_best_model",
    "save_only_model",
    "ignore_data_skip",
    "auto_find_batch_size",
    "disable_tqdm",
    "do_train",
    "do_eval",
    "do_predict",
    "train_sampling_strategy",
    "label_smoothing_factor",
    "push_to_hub",
    "use_cache",
    "local_rank",
}


def check_assignments(assignments: dict[str, Any]) -> None:
    """Raises UserError for what is no field of TrainingArguments, or has an option of its own, or another kind of value."""
    known = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.init}
    for key, value in assignments.items():
        if key not in known:
            close = ", ".join(get_close_matches(key, known, n=3, cutoff=0.4))
            hint = f" The closest are {close}." if close else ""
            raise UserError(f"--set {key}: no field of Hugging Face's TrainingArguments has that name.{hint}")
        if key in OWN:
            raise UserError(f"--set {key}: use {OWN[key]} instead.")
        if key in FIXED:
            raise UserError(f"--set {key}: tarnn train depends on it as it is; leave it out.")
        check_kind(key, value, known[key].type)


def check_kind(key: str, value: Any, declared: Any) -> None:
    """UserError for what is neither true nor false where it must be, or no number in its range.

    What else is wrong the Trainer or torch says before the first step is finished.
    """
    kinds = {get_origin(kind) or kind for kind in (get_args(declared) or (declared,))}
    whole = float not in kinds
    if kinds <= {bool, NoneType} and not isinstance(value, bool):
        raise UserError(f"--set {key}={value}: expected true or false.")
    if str in kinds or not kinds & {int, float} or (value is None and NoneType in kinds):
        return
    least = int(key == "per_device_eval_batch_size")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value >= least:
        raise UserError(f"--set {key}={value}: expected a {'whole number' if whole else 'number'} of at least {least}.")


def training_arguments(settings: RunSettings) -> TrainingArguments:
    """The Trainer's arguments; `max_steps` is set by the run, once it knows how long the text is.

    Unlike the Trainer's own defaults: AdamW with β₂ = 0.95 and weight decay 0.1, 2 % of warm-up and a cosine
    down to a tenth of the learning rate (unless the settings' recipe is another), nothing reported anywhere, and no
    work per step that nobody looks at.
    """
    check_assignments(settings.training_arguments)
    check_device(settings.device)
    if settings.max_minutes is not None and "lr_scheduler_type" in settings.training_arguments:
        raise UserError(
            "--set lr_scheduler_type: with --max-minutes the learning rate follows the clock; leave it out."
        )
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": FLOOR}}
    if "lr_scheduler_type" in settings.training_arguments | settings.recipe:
        schedule = {}
    options: dict[str, Any] = {
        "output_dir": str(settings.out / "checkpoints"),
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulate,
        "learning_rate": settings.learning_rate,
        "warmup_steps": WARMUP,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_steps": 1,
        "seed": settings.seed,
        "bf16": settings.bf16,
        "activation_checkpointing": settings.gradient_checkpointing,
        "logging_steps": settings.log_every,
        "eval_steps": settings.eval_every,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "use_cpu": settings.device == "cpu"
        or not torch.accelerator.is_available(),  # or processes would not find each other
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "average_tokens_across_devices": False,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cache": True,  # what the Trainer writes into the saved config; training itself never caches
        **schedule,
        **settings.recipe,
        **settings.training_arguments,
    }
    try:
        args = TrainingArguments(**options)
        try_parts(args)
    except Exception as error:  # of as many kinds as there are parts
        raise UserError(f"the Trainer refuses these settings: {' '.join(str(error).split())}") from error
    refuse_sharding_alone(args)
    return args


def refuse_sharding_alone(args: TrainingArguments) -> None:
    """Raise UserError for weights that are to be sharded in one process."""
    if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError(
            "--set fsdp shards a model over processes, and here there is one; start several (torchrun --nproc-per-node 2 "
            "-m tarnn train …), or leave it out."
        )


def check_device(name: str) -> None:
    """UserError for a device that the Trainer can't be given here: it takes the CPU or the accelerator."""
    here = torch.accelerator.current_accelerator(check_available=True)
    known = ["auto", "cpu", *([] if here is None else [here.type])]
    if name not in known:
        which = " Choose one of several by CUDA_VISIBLE_DEVICES." if ":" in name else ""
        raise UserError(f"--device {name} can't be used here; expected {' or '.join(known)}.{which}")


def try_parts(args: TrainingArguments) -> None:
    """Makes what the Trainer would make only after the data are read: optimizer, schedule, reports."""
    weights = torch.nn.Linear(1, 1)
    Trainer.get_optimizer_cls_and_kwargs(args, weights)  # type: ignore[arg-type]
    get_scheduler(
        args.lr_scheduler_type,
        torch.optim.SGD(weights.parameters(), 1.0),
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs=cast(dict, args.lr_scheduler_kwargs or {}),
    )
    for callback in get_reporting_integration_callbacks(args.report_to):
        callback()


BYTES_PER_WEIGHT = 16  # the weight, its gradient and Adam's two sums, in float32


def refuse_too_large(task: Task, args: TrainingArguments) -> None:
    """UserError where the weights, or the least that a batch needs, are more than the memory that is free.

    The least that a batch needs: its logits and what enters each layer. Nothing is allocated to find out. Processes on one
    machine share its memory, and all of them the weights where these are sharded.
    """
    config, example = task.config(), task.collate(task.examples.__getitems__([0]))
    weights, places = config.num_parameters_estimate(), example.get("attention_mask")  # of frames, of many numbers each
    longest = max(x.numel() for x in (example.values() if places is None else [places]))
    tokens = args.train_batch_size * longest
    per_token = 4 * (config.hidden_size * config.num_hidden_layers + (getattr(config, "vocab_size", 0) or 0))
    on_gpu = args.device.type == "cuda"
    free = torch.cuda.mem_get_info(args.device)[0] if on_gpu else psutil.virtual_memory().available
    free //= 1 if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shards = args.world_size if args.fsdp else 1
    for what, needed, smaller in (
        (f"{weights:,} parameters", weights * BYTES_PER_WEIGHT // shards, "--hidden-size, --layers or --mixtures"),
        (f"batches of {tokens:,} tokens", tokens * per_token, "--batch-size or --context"),
    ):
        if needed > free:
            raise UserError(
                f"{what} need at least {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free; choose a smaller "
                f"{smaller}."
            )
