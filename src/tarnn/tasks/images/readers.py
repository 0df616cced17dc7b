"""Readers of images (MNIST's idx files, npz, pictures, rows of `datasets`), which hold a source in memory, a byte per value."""

import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tarnn.data.sources import dataset_rows
from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.removed import message

KINDS = (
    "a folder or file of idx (MNIST) or npz, pictures, or 'datasets:NAME[:CONFIG[:SPLIT]]'; ':train', ':valid' or ':test' after "
    "a folder names one of its parts"
)
MOST_CLASSES = 2**16  # an embedding is made for each number up to the highest label
# by part: how the name of its files begins, and the names of its folders
PARTS = {
    "train": (r"train", r"train(ing)?$"),
    "valid": (r"val|dev", r"(val(id(ation)?)?|dev)$"),
    "test": (r"test|t10k", r"test(ing)?$"),
}
FORMATS = {
    "idx": r"images[-.]idx[34]-ubyte(\.gz)?$",
    "npz": r"\.npz$",
    "picture": r"\.(png|jpe?g|gif|bmp|tiff?|webp|p[gpn]m)$",
}
Pixels = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Images:
    """Images of one size, uint8 (n, height, width, channels), and their classes, int64 (n,), where they are known."""

    pixels: np.ndarray
    labels: np.ndarray | None
    source: str

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of an image."""
        return self.pixels.shape[1:]

    @property
    def num_classes(self) -> int:
        """One more than the highest label; 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """Hash these images and labels, whatever files they came from."""
        hasher = hashlib.blake2b(repr(self.pixels.shape).encode(), digest_size=16)
        hasher.update(np.ascontiguousarray(self.pixels).data)
        hasher.update(b"" if self.labels is None else np.ascontiguousarray(self.labels).data)
        return hasher.hexdigest()

    def take(self, index) -> "Images":
        """Return some of the images: a slice or an array of indices."""
        labels = None if self.labels is None else self.labels[index]
        return Images(self.pixels[index], labels, self.source)

    def split(self, held_out: int, seed: int = 0) -> tuple["Images", "Images"]:
        """Split off `held_out` images, picked at random by `seed`: a folder may be sorted by class."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.take(np.sort(order[held_out:])), self.take(np.sort(order[:held_out]))


def read_images(source: str, *, parts: Sequence[str] = ("train",)) -> Images:
    """Read the images of 'datasets:…', a file, or a folder, after which ':train', ':valid' or ':test' may stand.

    The names of a folder's files say which part they belong to; for pictures, that of the outermost folder. Where the
    source names none, the first of `parts` that there is is read; a folder without parts is read whole.
    The name of the folder that a picture lies in is its class.

    Raises UserError, in a sentence that names the file: no such source, nothing in it, files of several formats,
    a damaged file, images of several sizes.
    """
    if source.startswith("datasets:"):
        return read_dataset(source)
    path, wanted = part_of(source)
    where = Path(path).expanduser()
    if where.is_dir():
        return read_folder(where, wanted, parts)
    if not where.exists():
        gone = message(f"read_images({path})")
        raise UserError(f"{path}: no such file or folder; expected {KINDS}. {gone}".rstrip())
    if wanted:
        raise UserError(f"{source} names a part of a file; only folders have parts. Leave ':{wanted}' out.")
    if (kind := format_of(where)) is None:
        raise UserError(f"{path} is no file of images by its name; expected {KINDS}.")
    return Images(*read_file(where, kind), source)


def part_of(source: str) -> tuple[str, str | None]:
    """Split 'mnist:test' into ('mnist', 'test'); 'mnist' has the part None."""
    path, colon, part = source.rpartition(":")
    return (path, part) if colon and part in PARTS else (source, None)


def parts_of(source: str) -> list[str]:
    """Return the parts that a source's folder has, by the names of its files; none of a file."""
    folder = Path(part_of(source)[0]).expanduser()
    found = files_by_part(folder) if folder.is_dir() else {}
    return [part for part in PARTS if part in found]


def format_of(path: Path) -> str | None:
    return next((name for name, pattern in FORMATS.items() if re.search(pattern, path.name.lower())), None)


def files_by_part(folder: Path) -> dict[str, list[Path]]:
    """Find a folder's files of images by part ('' for none): idx and npz in itself, or else pictures, also below it.

    The part of pictures is the outermost folder's, if that of each has one.
    """
    files = [path for path in sorted(folder.iterdir()) if format_of(path) in ("idx", "npz")]
    pictures = not files
    if pictures:
        below = (path for path in sorted(folder.rglob("*")) if format_of(path))
        files = [path for path in below if not any(x.startswith(".") for x in path.relative_to(folder).parts)]
    if not files:
        raise UserError(f"folder {folder} has no images in it; expected {KINDS}.")
    found: dict[str, list[Path]] = {}
    for path in files:
        name = path.relative_to(folder).parts[0].lower()
        part = next((part for part, patterns in PARTS.items() if re.match(patterns[pictures], name)), "")
        found.setdefault(part, []).append(path)
    return {"": files} if pictures and "" in found else found


def read_folder(folder: Path, wanted: str | None, parts: Sequence[str]) -> Images:
    found = files_by_part(folder)
    there = [part for part in PARTS if part in found]
    part = wanted or next((p for p in parts if p in there), "")
    if part not in found:
        missing = " or ".join(parts) if wanted is None else wanted
        raise UserError(
            f"folder {folder} has no part called {missing}; it has {', '.join(there) or 'none'}. Name the one that "
            f"is meant, as in {folder}:{there[0] if there else 'PART'}."
        )
    files = found[part]
    pixels, labels = zip(*(read_file(path, str(format_of(path))) for path in files), strict=True)
    if bare := [path for path, some in zip(files, labels) if (some is None) != (labels[0] is None)]:
        raise UserError(f"of {files[0]} and {bare[0]} one has labels; expected all or none of {folder} to.")
    classes = None if labels[0] is None else np.concatenate(labels)
    if format_of(files[0]) == "picture":
        classes = classes_of(folder, files, bool(part))
    # one file is not copied: it may take gigabytes
    whole = pixels[0] if len(files) == 1 else of_one_size(pixels, files)
    return Images(whole, classes, f"{folder}:{part}" if part else str(folder))


def of_one_size(pixels: Sequence[np.ndarray], names: Sequence[Any]) -> np.ndarray:
    """Join images; UserError where one has another size than the first."""
    for name, piece in zip(names, pixels, strict=True):
        if piece.shape[1:] != pixels[0].shape[1:]:
            raise UserError(
                f"{name} has images of {size(piece.shape[1:])}, {names[0]} of {size(pixels[0].shape[1:])}; a source's "
                "images are all of one size. Resize or convert them."
            )
    return np.concatenate(pixels)


def classes_of(folder: Path, paths: Sequence[Path], in_parts: bool) -> np.ndarray | None:
    """Number the folders that pictures lie in; None where some lie in no folder but a part's."""
    homes = [path.parent for path in paths]
    if any(home == folder or (in_parts and home.parent == folder) for home in homes):
        return None
    names = sorted({home.name for home in homes})
    return np.array([names.index(home.name) for home in homes], np.int64)


def read_file(path: Path, kind: str) -> Pixels:
    """Read images (n, height, width, channels) of a file, and one label per image or None; UserError for anything else."""
    try:
        pixels, labels = {"idx": read_idx_images, "npz": read_npz, "picture": read_picture}[kind](path)
    except (UserError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # zlib, zipfile, numpy and PIL each have their own
        reason = " ".join(str(error).split())[:160] or "it ends too early"
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {reason}): it is damaged or no {kind} file. Take an "
            "intact copy."
        ) from error
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or 0 in pixels.shape or pixels.shape[3] not in (1, 3):
        raise UserError(
            f"{path} has images of shape {pixels.shape} and type {pixels.dtype}; expected uint8 (n, height, width"
            "[, channels]), at least one image, of 1 channel or 3."
        )
    return np.require(pixels, requirements=["C", "W"]), None if labels is None else checked(labels, len(pixels), path)


def checked(labels: np.ndarray, count: int, where: Any) -> np.ndarray:
    """Return the labels of images as int64; UserError for others than one whole number per image."""
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UserError(
            f"{where} has labels of shape {labels.shape} and type {labels.dtype} for {count:,} images; "
            "expected one whole number per image."
        )
    if wrong := [label for label in (labels.min(), labels.max()) if not 0 <= label < MOST_CLASSES]:
        raise UserError(f"{where} has a label {wrong[0]}; expected 0 to {MOST_CLASSES - 1:,}.")
    return labels.astype(np.int64)


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
    """Read an idx file, and the labels beside it: `labels` for `images` in its name, and `idx1` for `idx3`."""
    name = re.sub(r"idx\d", "idx1", path.name.replace("images", "labels"))
    beside = [path.with_name(x) for x in (name, name + ".gz", name.removesuffix(".gz")) if x != path.name]
    return read_idx(path), next((read_idx(file) for file in beside if file.is_file()), None)


def read_npz(path: Path) -> Pixels:
    """Read an npz file: `images` with `labels`, or `x` with `y`."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:  # np.load leaves a torn file open
        for images, classes in (("images", "labels"), ("x", "y")):
            if images in archive.files:
                return archive[images], archive[classes] if classes in archive.files else None
        raise ValueError(f"it holds {', '.join(archive.files) or 'nothing'}; expected `images` and perhaps `labels`")


def read_picture(path: Path) -> Pixels:
    with needed_for(str(path)):
        from PIL import Image
    with Image.open(path) as file:
        return as_array(file, path)[None], None


def as_array(image: Any, where: Any) -> np.ndarray:
    """Return a Pillow image as (height, width, channels): grey or RGB without loss. Transparency is refused."""
    image.load()
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
        image = image.convert("RGB")
    mode = {"L": "L", "1": "L", "RGB": "RGB", "P": "RGB"}.get(image.mode)
    if mode is None or "transparency" in image.info:
        kind = "transparent" if mode else image.mode
        raise UserError(
            f"{where} is a picture of a kind that 8-bit grey or RGB can't hold ({kind}); convert it to one of them."
        )
    array = np.array(image.convert(mode))
    return array.reshape(*array.shape[:2], -1)


def read_dataset(source: str) -> Images:
    """Read rows of `datasets`: the first field that holds pictures, and `label`, `labels` or `fine_label` if there is one."""
    pixels, labels, places = [], [], []
    for place, row in dataset_rows(source):
        assert isinstance(row, dict)
        picture: Any = next((x for x in row.values() if hasattr(x, "getextrema")), None)
        if picture is None:
            raise UserError(
                f"{place} has no picture in its fields {', '.join(row) or 'nothing'}; name another dataset."
            )
        pixels.append(as_array(picture, place)[None])
        labels.append(next((row[name] for name in ("label", "labels", "fine_label") if name in row), None))
        places.append(place)
    if not pixels:
        raise UserError(f"{source} is empty; expected rows with pictures.")
    classes = None if None in labels else checked(np.array(labels), len(pixels), source)
    return Images(of_one_size(pixels, places), classes, source)


def size(shape: Sequence[int]) -> str:
    """Describe a shape: (28, 28, 1) is '28 × 28 pixels in grey'."""
    return f"{shape[0]} × {shape[1]} pixels in {'grey' if shape[2] == 1 else 'colour'}"


def check_fit(images: Images, shape: tuple[int, int, int], num_classes: int, whose: str = "the model") -> None:
    """UserError for images of another (height, width, channels) than `whose`, and for labels beyond its classes or none."""
    if images.shape != shape:
        raise UserError(
            f"{images.source} has images of {size(images.shape)}, and {whose} of {size(shape)}; give images of that size."
        )
    if num_classes and (images.labels is None or images.num_classes > num_classes):
        problem = "no labels" if images.labels is None else f"a label {images.num_classes - 1}"
        raise UserError(
            f"{images.source} has {problem}, and {whose} has {num_classes} classes; give images of these classes."
        )
