"""Images from a trained model: drawn from nothing or from half of one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tarnn.cli.progress import progress
from tarnn.decoding.loop import Step
from tarnn.decoding.pixels import pixel_sampler, upper_rows
from tarnn.decoding.state_file import check_writable
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.images import Images, read_images
from tarnn.tasks.images.drawing import LEAST_SIDE, choose_labels, draw, image_grid, with_headings, write_png
from tarnn.tasks.images.readers import check_fit

HIDDEN = 127  # the shade of what a completion does not see


@dataclass(frozen=True)
class ImageRequest:
    """The options of `tarnn generate` for a model of images."""

    out: Path = Path("images.png")
    num_samples: int = 16
    complete: str | None = None
    hidden: float = 0.5
    class_labels: Sequence[int] = ()
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.hidden <= 1:
            raise UserError(f"--hidden must be above 0 and at most 1; got {self.hidden}.")
        for name, number in (("--batch-size", self.batch_size), ("--num-samples", self.num_samples)):
            if number < 1:
                raise UserError(f"{name} must be 1 or more; got {number}.")
        if self.complete and self.class_labels:
            raise UserError("--complete takes each image's own class; leave --class-label out.")


def generate_images(
    request: ImageRequest, load: Callable[[], tuple[Any, Step, str]], sampling: dict[str, Any], *, report: Log
) -> None:
    """Draw or complete images, into a PNG.

    `load` opens the model, as `open_images` does; `sampling` are the arguments of the sampler; `report` takes lines about the
    progress.
    """
    check_writable(request.out, "the picture")
    model, step, about = load()
    report(f"tarnn: {about}")
    config, count = model.config, request.num_samples
    images, labels, known, rows = None, None, None, 0
    if request.complete:
        images = first(read_images(request.complete, parts=("test", "valid")), count)
        check_fit(images, (config.image_height, config.image_width, config.num_channels), config.num_classes)
        rows = visible_rows(request.hidden, config.image_height)
        known = upper_rows(torch.from_numpy(images.pixels), rows)
        labels = torch.from_numpy(images.labels) if config.num_classes else None
    else:
        labels = choose_labels(request.class_labels, count, config.num_classes)
    start = time.perf_counter()
    drawn = draw(
        model,
        count,
        request.batch_size,
        pixel_sampler(model.likelihood, **sampling),
        labels=labels,
        known=known,
        step=step,
        track=partial(progress, report=report),
    )
    seconds = time.perf_counter() - start
    report(f"tarnn: {count:,} images in {seconds:.2f} s ({count / max(seconds, 1e-9):,.2f} images/s)")
    if images is None:
        names = () if labels is None else labels.tolist()
        write_png(request.out, image_grid(drawn, least_side=LEAST_SIDE, labels=names))
    else:
        write_png(request.out, completions(images.pixels, drawn, rows))
    print(request.out, flush=True)


def visible_rows(hidden: float, height: int) -> int:
    """How many rows a completion sees: all but the hidden part, of which there is at least one."""
    return height - max(1, round(hidden * height))


def completions(originals: np.ndarray, made: np.ndarray, rows: int) -> np.ndarray:
    """Return a line per image: what was given, what was drawn from it, and the true image."""
    seen = originals.copy()
    seen[:, rows:] = HIDDEN
    lines = np.stack([seen, made, originals], 1).reshape(-1, *made.shape[1:])
    return with_headings(image_grid(lines, 3, least_side=LEAST_SIDE), ("given", "drawn", "true"))


def first(images: Images, count: int) -> Images:
    """The first `count` images. UserError where there are fewer."""
    if len(images) < count:
        raise UserError(f"{images.source} has {len(images):,} images, and {count:,} were asked for.")
    return images.take(slice(count))
