"""Whether a model fits into the memory that is free: refused before any of it is taken."""

import psutil
import torch
from transformers import TrainingArguments

from tarnn.errors import UserError
from tarnn.tasks import Task

BYTES_PER_WEIGHT = 16  # the weight, its gradient and Adam's two sums, in float32


def refuse_too_large(task: Task, args: TrainingArguments) -> None:
    """UserError where the weights, or the least that a batch needs, are more than the memory that is free.

    The least that a batch needs: its logits and what enters each layer. Nothing is allocated to find out.
    """
    config, free = task.config(), free_memory(args)
    weights = config.num_parameters_estimate()
    refuse_beyond(free, weights * BYTES_PER_WEIGHT, f"{weights:,} parameters", "--hidden-size, --layers or --mixtures")
    example = task.collate(task.examples.__getitems__([0]))  # type: ignore[attr-defined]
    longest = example.get("attention_mask")  # of frames, each of which has many numbers
    numbers = max(x.numel() for x in example.values()) if longest is None else longest.numel()
    tokens = args.train_batch_size * numbers
    per_token = 4 * (config.hidden_size * config.num_hidden_layers + (getattr(config, "vocab_size", 0) or 0))
    refuse_beyond(free, tokens * per_token, f"batches of {tokens:,} tokens", "--batch-size or --context")


def refuse_beyond(free: int, needed: int, what: str, smaller: str) -> None:
    if needed > free:
        raise UserError(
            f"{what} need at least {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free; choose a smaller "
            f"{smaller}."
        )


def free_memory(args: TrainingArguments) -> int:
    """Bytes, of the device that trains."""
    if args.device.type == "cuda":
        return torch.cuda.mem_get_info(args.device)[0]
    return psutil.virtual_memory().available
