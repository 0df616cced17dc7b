"""Images side by side in one PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from tarnn.errors import UserError
from tarnn.extras import needed_for

GAP, BACKGROUND = 2, 127  # pixels between images, and their shade
LEAST_SIDE = 64  # pixels of an image in a grid for the eye: smaller ones are enlarged
LABEL = 14  # pixels that a label above an image takes


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
