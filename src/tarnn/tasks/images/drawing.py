"""Images drawn by a model, or completed: a batch at a time, value after value."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from tarnn.decoding import fastest_step
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.pixels import PixelLoop
from tarnn.decoding.samplers import Sampler
from tarnn.decoding.threads import threads_for_steps
from tarnn.errors import UserError
from tarnn.models.images import ImageModel

FEW = 8  # images at once, up to which one thread is as fast


def take_fastest_step(loop: PixelLoop) -> None:
    loop.step = fastest_step(loop.model).step


def draw(
    model: ImageModel,
    count: int,
    batch_size: int,
    sample: Sampler,
    *,
    labels: Tensor | None = None,
    known: Tensor | None = None,
    prepare: Callable[[PixelLoop], None] = take_fastest_step,
    track: Callable[[Iterator[int], int, str], Iterable[int]] = lambda values, total, text: values,
) -> np.ndarray:
    """`count` images, at most `batch_size` at once: uint8 (count, height, width, channels).

    prepare(loop) gives the first loop its step, which the others take too if it is a fused one.
    track(values, their number, what they are) is what the values of a batch pass through: a place for a progress bar.
    """
    drawn, length, fused = [], model.config.sequence_length, None
    sizes = [min(batch_size, count - i) for i in range(0, count, batch_size)]
    for i, size in zip(range(0, count, batch_size), sizes, strict=True):
        part = slice(i, i + size)
        loop = PixelLoop(
            model,
            size,
            class_labels=None if labels is None else labels[part].to(model.device),
            known=None if known is None else known[part],
            step=fused,
        )
        if fused is None:
            prepare(loop)
            fused = loop.step if isinstance(loop.step, FusedStep) else None
        with threads_for_steps(model) if size <= FEW else nullcontext():
            for _ in track(loop.draw(sample), length - loop.filled, f"images {i + 1}–{i + size} of {count}"):
                pass
        drawn.append(loop.images.cpu().numpy())
    return np.concatenate(drawn)


def choose_labels(requested: Sequence[int], count: int, num_classes: int) -> Tensor | None:
    """The class of each image: those requested, or all there are, in turn; None for a model without classes."""
    if not num_classes:
        if requested:
            raise UserError("this model knows no classes; leave --class-label out.")
        return None
    if wrong := [label for label in requested if not 0 <= label < num_classes]:
        raise UserError(f"--class-label {wrong[0]} is none of this model's classes, 0 to {num_classes - 1}.")
    classes = torch.tensor(requested or range(num_classes))
    return classes.repeat(-(-count // len(classes)))[:count]
