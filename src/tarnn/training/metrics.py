"""Bits per byte and perplexity: what a cross-entropy in nats means, whatever the tokenizer."""

import math

from torch import Tensor

from tarnn.tasks.base import Trainable


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Σ nats / (bytes · ln 2): the bits that a byte of the text takes, compressed with the model's guesses.

    Comparable between tokenizers, and with compressors (8 × compressed size / size), since every token is
    paid for, the separators of documents too, which have no bytes.

    >>> bits_per_byte(nats=math.log(256) * 100, num_bytes=100)
    8.0
    """
    return nats / (num_bytes * math.log(2))


def measure(nats: float, task: Trainable) -> float:
    """A loss in the unit of the task: bits per byte, unless that is the loss."""
    return nats if task.bytes_per_token is None else bits_per_byte(nats, task.bytes_per_token)


def perplexity(nats_per_token: float) -> float:
    """e^(nats per token); infinity where that is beyond a float."""
    return math.exp(nats_per_token) if nats_per_token < 700 else math.inf


def measures(task: Trainable, totals: Tensor) -> dict[str, float]:
    """The loss in nats, the measure in the task's unit, the perplexity and the rates, of the sums of all batches."""
    nats, tokens, num_bytes, *counts = totals.tolist()
    rates = {name: count / tokens for name, count in zip(task.rates, counts, strict=True)}
    measure = bits_per_byte(nats, num_bytes)
    return {"loss": nats / tokens, "measure": measure, "perplexity": perplexity(nats / tokens), **rates}
