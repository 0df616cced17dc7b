"""Images drawn by a model, or completed, a batch at a time; and many of them side by side in one PNG."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from tarnn.decoding.loop import Step
from tarnn.decoding.pixels import PixelLoop
from tarnn.decoding.samplers import Sampler
from tarnn.decoding.threads import threads_for_steps
from tarnn.errors import UserError
from tarnn.extras import needed_for

FEW = 8  # images at once, up to which one thread is as fast
GAP, BACKGROUND = 2, 127  # pixels between images, and their shade
LEAST_SIDE = 64  # pixels of an image in a grid for the eye: smaller ones are enlarged
LABEL = 14  # pixels that a label above an image takes


def draw(
    model: Any,
    count: int,
    batch_size: int,
    sample: Sampler,
    *,
    labels: Tensor | None = None,
    known: Tensor | None = None,
    step: Step,
    track: Callable[[Iterator[int], int, str], Iterable[int]] = lambda values, total, text: values,
) -> np.ndarray:
    """`count` images, at most `batch_size` at once: uint8 (count, height, width, channels).

    model: as `PixelLoop` takes it. step: of the model, such as its fastest.
    track(values, their number, what they are) is what the values of a batch pass through: a place for a progress bar.
    """
    drawn, length = [], model.config.sequence_length
    sizes = [min(batch_size, count - i) for i in range(0, count, batch_size)]
    for i, size in zip(range(0, count, batch_size), sizes, strict=True):
        part = slice(i, i + size)
        loop = PixelLoop(
            model,
            size,
            class_labels=None if labels is None else labels[part].to(model.device),
            known=None if known is None else known[part],
            step=step,
        )
        with threads_for_steps(getattr(model, "opened", model)) if size <= FEW else nullcontext():
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


def image_grid(
    images: UInt8[np.ndarray, "n height width channels"],
    columns: int | None = None,
    *,
    least_side: int = 0,
    labels: Sequence[object] = (),
) -> UInt8[np.ndarray, "grid_height grid_width channels"]:
    """n images in rows of `columns` (by default about as many as there are rows), `GAP` pixels between them.

    Each pixel is repeated until an image's longer side has at least `least_side`. With labels, one per image, each
    is written above its image.
    """
    n, height, width, channels = images.shape
    columns = columns or int(np.ceil(np.sqrt(n)))
    scale = max(1, -(-least_side // max(height, width)))
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    if len(labels):
        above = np.stack([label_strip(str(label), width * scale) for label in labels])
        images = np.concatenate([above[..., None].repeat(channels, -1), images], axis=1)
    height, width, rows = images.shape[1], images.shape[2], -(-n // columns)
    shape = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, channels)
    grid = np.full(shape, BACKGROUND, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        grid[top : top + height, left : left + width] = image
    return grid


def with_headings(
    grid: UInt8[np.ndarray, "height width channels"], headings: Sequence[str]
) -> UInt8[np.ndarray, "more_height width channels"]:
    """Write a heading above each column of a grid, which has as many columns."""
    width = (grid.shape[1] + GAP) // len(headings) - GAP
    above = np.full((LABEL, *grid.shape[1:]), BACKGROUND, np.uint8)
    for i, heading in enumerate(headings):
        above[:, i * (width + GAP) :][:, :width] = label_strip(heading, width)[..., None]
    return np.concatenate([above, grid])


def label_strip(text: str, width: int) -> UInt8[np.ndarray, "height width"]:
    """White text on the background's grey, LABEL pixels high."""
    with needed_for("a label of an image"):
        from PIL import Image, ImageDraw

    strip = Image.new("L", (width, LABEL), BACKGROUND)
    ImageDraw.Draw(strip).text((width // 2, LABEL // 2), text, fill=255, anchor="mm")
    return np.asarray(strip)


def write_png(path: Path, picture: UInt8[np.ndarray, "height width channels"]) -> None:
    """A picture in grey or colour as a PNG file; UserError where it can't be written."""
    with needed_for(str(path)):
        from PIL import Image
    try:
        Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(path, format="PNG")
    except OSError as error:
        raise UserError(
            f"the picture can't be written to {path}: {error.strerror or error}. Give another place, or make room."
        ) from error
