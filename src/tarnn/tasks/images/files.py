"""Files of images, one function per format: pixels uint8 (n, height, width[, channels]), and labels (n,) or None.

Readers raise what their libraries raise; `read_file` turns it into one sentence that names the file.
"""

import gzip
import math
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tarnn.errors import UserError
from tarnn.extras import needed_for

MOST_CLASSES = 2**16  # an embedding is made for each number up to the highest label
PICTURE_MODES = {"L": "L", "1": "L", "RGB": "RGB", "P": "RGB"}  # lossless into what stands on the right
Pixels = tuple[np.ndarray, np.ndarray | None]


def read_idx(path: Path) -> np.ndarray:
    """Read the array in an idx file of unsigned bytes (MNIST's format), gzip-compressed or not.

    Two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian int32, the data.
    """
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"it begins with {data[:4].hex(' ') or 'nothing'}, expected 00 00 08 and the number of axes")
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def read_idx_images(path: Path) -> Pixels:
    """Images of an idx file, with the labels beside it: `labels` for `images` in its name, and `idx1` for `idx3`."""
    pixels, name = read_idx(path), re.sub(r"idx\d", "idx1", path.name.replace("images", "labels"))
    for file in (path.with_name(x) for x in (name, name + ".gz", name.removesuffix(".gz")) if x != path.name):
        if file.is_file():
            with reading(file, "idx"):
                return pixels, read_idx(file)
    return pixels, None


def read_npz(path: Path) -> Pixels:
    """Images of an npz file: `images` with `labels`, `x` with `y`, or `data` with `labels` (ImageNet64's batches)."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:  # np.load leaves a torn file open
        for images, classes in (("images", "labels"), ("x", "y"), ("data", "labels")):
            if images in archive.files:
                labels = archive[classes] if classes in archive.files else None
                return from_planes(archive[images], labels) if images == "data" else (archive[images], labels)
        raise ValueError(f"it holds {', '.join(archive.files) or 'nothing'}; expected `images` and perhaps `labels`")


def read_pickle(path: Path) -> Pixels:
    """A batch of CIFAR-10's or ImageNet64's Python version: a pickled dict with `data` and `labels`."""
    with path.open("rb") as file:
        content = ArraysOnly(file, encoding="latin1").load()
    content = {k.decode() if isinstance(k, bytes) else k: x for k, x in content.items()}
    return from_planes(content["data"], content.get("labels"))


class ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain values; nothing else can be made, so nothing can be run."""

    ALLOWED = {
        (f"{home}.multiarray", name) for home in ("numpy.core", "numpy._core") for name in ("_reconstruct", "scalar")
    } | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return super().find_class(module, name)


def from_planes(rows: np.ndarray, labels: Any) -> Pixels:
    """Images as rows of three square planes, (n, 3 · side · side). ImageNet64 counts its classes from 1."""
    side = math.isqrt(rows.shape[1] // 3)
    pixels = rows.reshape(len(rows), 3, side, side).transpose(0, 2, 3, 1)
    return pixels, None if labels is None else np.asarray(labels) - np.int64(side == 64)


def read_picture(path: Path) -> Pixels:
    """One PNG or JPEG: grey as one channel, colour as three. A palette becomes its colours; transparency is refused."""
    with needed_for(str(path)):
        from PIL import Image
    with Image.open(path) as file:
        image: Image.Image = file.copy()
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        image = image.convert("RGB")
    mode = PICTURE_MODES.get(image.mode)
    if mode is None or "transparency" in image.info:
        kind = "transparent" if mode else image.mode
        raise UserError(
            f"{path} is a picture of a kind that 8-bit grey or RGB can't hold ({kind}); convert it to one of them."
        )
    array = np.array(image.convert(mode))
    return array.reshape(1, *array.shape[:2], -1), None


# name of a format → the names of its files, and what reads one
FORMATS: dict[str, tuple[str, Callable[[Path], Pixels]]] = {
    "idx": (r"images[-.]idx[34]-ubyte(\.gz)?$", read_idx_images),
    "npz": (r"\.npz$", read_npz),
    "pickled": (r"^((train_)?data_batch_\d+|test_batch|val_data)$", read_pickle),
    "picture": (r"\.(png|jpe?g)$", read_picture),
}


def format_of(path: Path) -> str | None:
    return next((name for name, (pattern, _) in FORMATS.items() if re.search(pattern, path.name.lower())), None)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever goes wrong within into one sentence about that file; what is missing stays an OSError."""
    try:
        yield
    except (UserError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # zlib, zipfile, numpy, pickle and PIL each have their own
        reason = " ".join(str(error).split())[:160] or "it ends too early"
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {reason}): it is damaged or no {kind} file. Take an "
            "intact copy."
        ) from error


def read_file(path: Path, kind: str) -> Pixels:
    """Images (n, height, width, channels) of a file, and one label per image or None; UserError for anything else."""
    with reading(path, kind):
        pixels, labels = FORMATS[kind][1](path)
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or 0 in pixels.shape or pixels.shape[3] not in (1, 3):
        raise UserError(
            f"{path} has images of shape {pixels.shape} and type {pixels.dtype}; expected uint8 (n, height, width"
            "[, channels]), at least one image, of 1 channel or 3."
        )
    if labels is not None:
        if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
            raise UserError(
                f"{path} has labels of shape {labels.shape} and type {labels.dtype} for {len(pixels):,} images; "
                "expected one whole number per image."
            )
        if wrong := [label for label in (labels.min(), labels.max()) if not 0 <= label < MOST_CLASSES]:
            raise UserError(f"{path} has a label {wrong[0]}; expected 0 to {MOST_CLASSES - 1:,}.")
        labels = labels.astype(np.int64)
    return np.require(pixels, requirements=["C", "W"]), labels
