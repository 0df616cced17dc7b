"""A training loop for experiments whose models are not all ours: the same for every contender, and it goes on where it was
stopped.

AdamW, gradients clipped at norm 0.5, a learning rate that rises for a tenth of the steps and falls as a cosine to a tenth.
A batch is a function of the step's number, so a run that was stopped sees the batches of one that was not.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Progress:
    """What a run has come to; saved with its weights."""

    step: int = 0
    seconds: float = 0.0  # of training, in processor time per thread
    curve: list[dict[str, Any]] = field(default_factory=list)  # one entry for each time that was measured


def train(
    folder: Path,
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    *,
    every: int,
    learning_rate: float,
    measure: Callable[[nn.Module], dict[str, float]],
) -> Progress:
    """Train up to `steps`. Every so many the model is measured and saved in `folder`, from where the next call goes on.

    loss(model, step): of the batch of that step. measure(model): in evaluation mode, without gradients.
    """
    *_, progress = train_in_parts(folder, model, loss, steps, every=every, learning_rate=learning_rate, measure=measure)
    return progress


def train_in_parts(
    folder: Path,
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    limit: float,
    *,
    unit: str = "step",
    every: float,
    learning_rate: float,
    measure: Callable[[nn.Module], dict[str, float]],
) -> Iterator[Progress]:
    """`train`, which stops each time that the model was measured, so that several models can be trained in turns.

    It yields what the run has come to: once before it trains, then after each part. unit: what `limit` and `every` count,
    "step" or "seconds" (of training, in processor time per thread).
    """
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    path, progress, losses = folder / "checkpoint.pt", Progress(), []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
    yield progress
    model.train()
    while (before := getattr(progress, unit)) < limit:
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * scale(before, limit)
        value = loss(model, progress.step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        progress.step += 1
        progress.seconds += (time.process_time() - begun) / torch.get_num_threads()
        losses.append(float(value.detach()))
        after = getattr(progress, unit)
        if after // every > before // every or after >= limit:
            model.eval()
            with torch.no_grad():
                entry = {
                    "step": progress.step,
                    "seconds": round(progress.seconds, 1),
                    "loss": sum(losses) / len(losses),
                    **measure(model),
                }
            model.train()
            progress.curve.append(entry)
            save(path, model, optimizer, progress)
            print(f"  {folder.name}: {entry}", flush=True)
            losses = []
            yield progress
    model.eval()


def in_turns(runs: Mapping[Key, Iterator[Progress]]) -> Iterator[tuple[Key, Progress]]:
    """A piece of each run, then the next piece of each, until all have ended."""
    waiting = dict(runs)
    while waiting:
        for key, pieces in list(waiting.items()):
            if (progress := next(pieces, None)) is None:
                del waiting[key]
            else:
                yield key, progress


def scale(done: float, limit: float) -> float:
    """Of the learning rate, by the steps or the seconds that are done."""
    warm = max(1, limit // 10)
    if done < warm:
        return min(1.0, (done + 1) / warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - warm) / max(1, limit - warm)))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}, partial)
    partial.replace(path)
