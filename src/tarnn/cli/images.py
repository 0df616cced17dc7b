"""Images from a trained model: drawn from nothing or from half of one, and what given images cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tarnn.cli.progress import progress
from tarnn.cli.step import prepare_step
from tarnn.decoding.pixels import pixel_sampler, upper_rows
from tarnn.decoding.state_file import check_writable
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.models.images import ImageModel
from tarnn.tasks.images import Images, read_images
from tarnn.tasks.images.drawing import choose_labels, draw
from tarnn.tasks.images.grid import LEAST_SIDE, image_grid, write_png
from tarnn.tasks.images.likelihood import bits_per_dim, check_fit

HIDDEN = 127  # the shade of what a completion does not see


@dataclass(frozen=True)
class ImageRequest:
    """What `tarnn generate` is to do with a model of images; the fields are its options."""

    out: Path = Path("images.png")
    num_samples: int = 16
    complete: str | None = None
    hidden: float = 0.5
    class_labels: Sequence[int] = ()
    evaluate: str | None = None
    limit: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.hidden <= 1:
            raise UserError(f"--hidden must be above 0 and at most 1; got {self.hidden}.")
        if self.batch_size < 1 or (self.limit is not None and self.limit < 1):
            raise UserError("--batch-size and --limit must be 1 or more.")
        if self.num_samples < 0 or (self.num_samples == 0 and not self.evaluate):
            raise UserError(f"--num-samples must be 1 or more, or 0 beside --evaluate; got {self.num_samples}.")
        if self.complete and self.class_labels:
            raise UserError("--complete takes each image's own class; leave --class-label out.")


def generate_images(
    request: ImageRequest, load: Callable[[], Any], sampling: dict[str, Any], *, weights: str | None, report: Log
) -> None:
    """Draws or completes images into a PNG, and reports bits per dimension, as asked for.

    `load` opens the model; `sampling` are the arguments of the sampler; `report` takes lines about the
    progress.
    """
    if request.num_samples:
        check_writable(request.out, "the picture")
    elif weights:
        raise UserError("--weights is for drawing, and --num-samples 0 draws nothing; leave it out.")
    model = load()
    sample = pixel_sampler(model.likelihood, **sampling)
    images, labels = None, None
    if request.num_samples and request.complete:
        images = first(read_images(request.complete, parts=("test", "valid")), request.num_samples)
        check_fit(model.config, images)
        if model.config.num_classes:
            labels = torch.from_numpy(images.labels)
    elif request.num_samples:
        labels = choose_labels(request.class_labels, request.num_samples, model.config.num_classes)
    held_out = read_images(request.evaluate, parts=("test", "valid")) if request.evaluate else None
    if held_out is not None:
        check_fit(model.config, held_out)  # before anything is drawn
    if request.num_samples:
        rows = visible_rows(request.hidden, model.config.image_height) if images is not None else 0
        start = time.perf_counter()
        known = None if images is None else upper_rows(torch.from_numpy(images.pixels), rows)
        count = request.num_samples if images is None else len(images)
        made = draw(
            model,
            count,
            request.batch_size,
            sample,
            labels=labels,
            known=known,
            prepare=partial(prepare_step, weights=weights, report=report),
            track=partial(progress, report=report),
        )
        report(f"tarnn: {speed(count, time.perf_counter() - start)}")
        if images is None:
            write_png(
                request.out, image_grid(made, least_side=LEAST_SIDE, labels=() if labels is None else labels.tolist())
            )
        else:
            write_png(request.out, completions(images.pixels, made, rows))
        print(request.out, flush=True)
    if held_out is not None:
        print(report_bits(model, held_out if request.limit is None else first(held_out, request.limit), report))


def report_bits(model: ImageModel, images: Images, report: Log) -> str:
    """Mean bits per dimension and its standard error, as a line."""
    batches, parts = bits_per_dim(model, images), []
    for part in progress(batches, None, f"bits per dimension of {len(images):,} images", report):
        parts.append(part)
    bits = torch.cat(parts)
    error = f" ± {bits.std().item() / len(bits) ** 0.5:.4f} (standard error)" if len(bits) > 1 else ""
    return f"{bits.mean().item():.4f}{error} bits/dim on {len(bits):,} images of {images.source}"


def visible_rows(hidden: float, height: int) -> int:
    """How many rows a completion sees: all but the hidden part, of which there is at least one."""
    return height - max(1, round(hidden * height))


def completions(originals: np.ndarray, made: np.ndarray, rows: int) -> np.ndarray:
    """A line per image: what was seen, what became of it, what it was."""
    seen = originals.copy()
    seen[:, rows:] = HIDDEN
    return image_grid(np.stack([seen, made, originals], 1).reshape(-1, *made.shape[1:]), 3, least_side=LEAST_SIDE)


def first(images: Images, count: int) -> Images:
    """The first `count` images. UserError where there are fewer."""
    if len(images) < count:
        raise UserError(f"{images.source} has {len(images):,} images, and {count:,} were asked for.")
    return images.take(slice(count))


def speed(count: int, seconds: float) -> str:
    return f"{count:,} images in {seconds:.2f} s ({count / max(seconds, 1e-9):,.2f} images/s)"
