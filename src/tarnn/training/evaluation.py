"""A trained model measured on data: what `tarnn eval` reports, as facts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tarnn.errors import UserError
from tarnn.numerics import widest
from tarnn.tasks import Task, Trained
from tarnn.tasks.base import Trainable
from tarnn.training.folder import CHECKPOINTS, SETTINGS, read_settings


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


PER_TOKEN = ("bits_per_byte", "bits_per_token")  # units of tasks whose nats per token have a perplexity


@torch.no_grad()
def evaluate(
    task: Task,
    model: Any,
    batches: Sequence[dict[str, torch.Tensor]],
    track: Callable[[Any, int], Any] = lambda steps, total: steps,
) -> dict[str, Any]:
    """Evaluate a model on batches: the measure of the task's unit, its rates, and its details.

    track(batches, their number) is what the batches pass through: a place for a progress bar.
    """
    model.eval()
    device, outcomes = model.device, []
    totals = torch.zeros(3 + len(task.rates), dtype=widest(device), device=device)
    for batch in track(batches, len(batches)):
        sums, some = task.outcome(model, {name: x.to(device) for name, x in batch.items()})
        totals += sums
        outcomes += some
    _, tokens, num_bytes, *_ = totals.tolist()
    if not num_bytes:
        raise UserError("there is nothing to measure: the data have no labels, or tokens that stand for no bytes.")
    numbers = measures(task, totals)
    facts: dict[str, Any] = {task.unit: numbers["measure"]}
    if task.unit in PER_TOKEN:
        facts |= {"perplexity": numbers["perplexity"], "tokens": round(tokens), "bytes": round(num_bytes)}
    return facts | {name: numbers[name] for name in task.rates} | task.details(outcomes)


def find_run(folder: Path) -> Path | None:
    """The folder of the run that a model is of: its own, or that of the checkpoint that it is; None without one."""
    places = [folder, folder.parent.parent] if folder.parent.name == CHECKPOINTS else [folder]
    return next((place for place in places if (place / SETTINGS).is_file()), None)


def trained(kind: type[Task], folder: Path, config: Any, sources: Sequence[str], **options: Any) -> Trained:
    """A model's folder with the settings of its run, or with those of `options` in their place.

    Raises UserError for an option that the task does not have.
    """
    run = find_run(folder)
    saved = None if run is None else read_settings(run)
    known = {f.name for f in fields(kind.settings_class)}
    kept = {} if saved is None else {k: v for k, v in saved["settings"].items() if k in known}
    wanted = {name: value for name, value in options.items() if value is not None}
    if unknown := wanted.keys() - known:
        raise UserError(
            f"--{min(unknown).replace('_', '-')} does not go with a model of {kind.of}, as {folder} is; leave it out."
        )
    where = {"sources": tuple(kept.get("sources", sources)), "out": run or folder, "resume": False, "overwrite": False}
    return Trained(folder, config, kind.settings_class(**kept | wanted | where), saved)
