"""Whether a model fits into the memory that is free: refused before any of it is taken."""

import os

import psutil
import torch
from transformers import TrainingArguments

from tarnn.errors import UserError
from tarnn.tasks import Task

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
