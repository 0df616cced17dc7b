"""Files of images, one function a format: pixels uint8 (n, height, width, channels), and labels int64 (n,) or None.

What a file is not (cut short, of another shape, of another kind) is a `UserError` of one sentence that names it.
"""

import gzip
import math
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tarnn.errors import UserError
from tarnn.extras import needed_for

IDX_UBYTE = 0x08
CIFAR_RECORD = 1 + 3 * 32 * 32  # a label and three planes
MOST_CLASSES = 2**16  # an embedding is made for each number up to the highest label
PICTURE_MODES = {"L": "L", "1": "L", "RGB": "RGB", "P": "RGB"}  # lossless into what stands on the right


class Pixels(NamedTuple):
    """The images of a file, and their classes where it has them."""

    pixels: np.ndarray  # uint8 (n, height, width, channels)
    labels: np.ndarray | None = None  # int64 (n,)


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Whatever goes wrong within becomes one sentence about that file; what is missing stays an OSError."""
    try:
        yield
    except (UserError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # zlib, zipfile, numpy, pickle and PIL each have their own
        reason = " ".join(str(error).split())[:160] or "it ends too early"
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {reason}): it is damaged or no {expected}. Take an "
            "intact copy."
        ) from error


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file of unsigned bytes (MNIST's format), gzip-compressed or not.

    Two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian int32, the data.
    """
    with reading(path, "idx file"):
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        if len(data) < 4 or data[:2] != b"\0\0" or data[2] != IDX_UBYTE or data[3] == 0:
            raise UserError(
                f"{path} is no idx file of unsigned bytes: it begins with {data[:4].hex(' ') or 'nothing'}, "
                "expected 00 00 08 and the number of axes."
            )
        axes, start = data[3], 4 + 4 * data[3]
        shape = tuple(int(n) for n in np.frombuffer(data[:start], ">i4", count=axes, offset=4))
        if len(data) - start != math.prod(shape):
            raise UserError(
                f"{path} is damaged: its header promises {' × '.join(map(str, shape))} = {math.prod(shape):,} "
                f"bytes, and {len(data) - start:,} follow. Take an intact copy."
            )
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx_images(path: Path) -> Pixels:
    """Images of an idx file, (n, height, width) or (n, height, width, channels), with the labels that lie beside it.

    Labels are in the file of the same name with `labels` for `images` and `idx1` for `idx3`, if there is one.
    """
    pixels = read_idx(path)
    beside = re.sub(r"idx\d", "idx1", path.name.replace("images", "labels"))
    zipped = [beside, beside + ".gz", beside.removesuffix(".gz")]
    named = next((path.with_name(n) for n in zipped if n != path.name and path.with_name(n).is_file()), None)
    return checked(path, pixels, None if named is None else read_idx(named), named)


def read_npz(path: Path) -> Pixels:
    """Images of an npz file: `images` with `labels`, `x` with `y`, or `data` with `labels` (ImageNet64's batches).

    `data` is (n, 3 · side · side), plane after plane; its labels count from 1 in ImageNet64's files.
    """
    with reading(path, "npz file"):
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("it is no zip archive, or was cut short")
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            for images, classes in (("images", "labels"), ("x", "y"), ("data", "labels")):
                if images in names:
                    pixels = archive[images]
                    labels = archive[classes] if classes in names else None
                    return (batch if images == "data" else checked)(path, pixels, labels)
    raise UserError(
        f"{path} has no images in it: it holds {', '.join(names) or 'nothing'}; expected `images` (n, height, "
        "width[, channels]) and perhaps `labels` (n,)."
    )


def read_cifar_binary(path: Path) -> Pixels:
    """CIFAR-10's binary version: records of a label and 32 × 32 pixels, plane after plane."""
    with reading(path, "CIFAR-10 binary file"):
        data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % CIFAR_RECORD:
        raise UserError(
            f"{path} is damaged or no CIFAR-10 binary file: it has {len(data):,} bytes; expected a multiple of "
            f"{CIFAR_RECORD:,} (a label and 32 × 32 × 3 values an image)."
        )
    records = data.reshape(-1, CIFAR_RECORD)
    if (highest := int(records[:, 0].max())) > 9:
        raise UserError(f"{path} is damaged or no CIFAR-10 binary file: it has a label {highest}; expected 0 to 9.")
    return batch(path, records[:, 1:], records[:, 0])


def read_pickle(path: Path) -> Pixels:
    """A batch of CIFAR-10's or ImageNet64's Python version: a pickled dict with `data` and `labels`.

    Only arrays, numbers and text are unpickled: a file that asks for any other object is refused.
    """
    with reading(path, "pickled batch of images"), path.open("rb") as file:
        content = ArraysOnly(file, encoding="latin1").load()
        if isinstance(content, dict):
            content = {k.decode("latin1") if isinstance(k, bytes) else k: x for k, x in content.items()}
        if not isinstance(content, dict) or "data" not in content:
            raise UserError(f"{path} holds no dict with `data`; expected a batch of CIFAR-10 or ImageNet64.")
        return batch(path, np.asarray(content["data"]), content.get("labels"))


class ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain values; nothing else can be made, so nothing can be run."""

    ALLOWED = {
        (module, name)
        for home in ("numpy.core", "numpy._core")
        for module, name in ((f"{home}.multiarray", "_reconstruct"), (f"{home}.multiarray", "scalar"))
    } | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return super().find_class(module, name)


def read_picture(path: Path) -> Pixels:
    """One PNG or JPEG: grey as one channel, colour as three. A palette becomes its colours; transparency is refused."""
    with needed_for(str(path)):
        from PIL import Image
    with reading(path, "picture"), Image.open(path) as file:
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
    return Pixels(array.reshape(1, *array.shape[:2], -1))


def batch(path: Path, rows: np.ndarray, labels: Any) -> Pixels:
    """Images as rows of three square planes, (n, 3 · side · side)."""
    side = math.isqrt(rows.shape[-1] // 3) if rows.ndim == 2 else 0
    if rows.ndim != 2 or side == 0 or 3 * side * side != rows.shape[1]:
        raise UserError(f"{path} has `data` of shape {rows.shape}; expected (n, 3 · side · side), plane after plane.")
    pixels = rows.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
    return checked(path, pixels, labels, first=1 if side == 64 else 0)


def checked(path: Path, pixels: np.ndarray, labels: Any, labels_path: Path | None = None, first: int = 0) -> Pixels:
    """Images (n, height, width[, channels]), and as many labels as there are of them, which count from `first`."""
    if pixels.dtype != np.uint8:
        raise UserError(f"{path} has pixels of type {pixels.dtype}; expected uint8, values from 0 to 255.")
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or 0 in pixels.shape or pixels.shape[3] not in (1, 3):
        raise UserError(
            f"{path} has images of shape {pixels.shape}; expected (n, height, width[, channels]), at least one, of 1 "
            "channel or 3. Labels are found by the images' name."
        )
    if labels is not None:
        where, labels = labels_path or path, np.asarray(labels)
        if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
            raise UserError(
                f"{where} has labels of shape {labels.shape} and type {labels.dtype} for {len(pixels):,} images; "
                "expected one whole number per image."
            )
        low, high = int(labels.min()), int(labels.max())
        if low < first or high - first >= MOST_CLASSES:
            raise UserError(
                f"{where} has a label {low if low < first else high}; expected classes numbered from {first} to at most "
                f"{first + MOST_CLASSES - 1:,}."
            )
        labels = labels.astype(np.int64) - first
    return Pixels(np.require(pixels, requirements=["C", "W"]), labels)
