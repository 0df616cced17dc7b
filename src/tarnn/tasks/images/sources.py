"""Images from wherever they lie: MNIST's idx files, npz, CIFAR-10, ImageNet64, folders of pictures, scikit-learn's digits.

All images of a source are held in memory, a byte for each channel of each pixel (all of ImageNet64: 15.7 GB; name
some of its batches for less).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.tasks.images.files import format_of, read_file

DIGITS_PARTS = ("train", "test")
KINDS = (
    "a folder or file of idx (MNIST), npz, CIFAR-10 or ImageNet64 batches (the Python versions), PNG or JPEG pictures, or "
    "'digits' (scikit-learn's 8 × 8 digits); ':train', ':valid' or ':test' after a folder names one of its parts"
)
# by part: how the name of its files begins, and the names of its folders
PARTS = {
    "train": (r"train|data_batch", r"train(ing)?$"),
    "valid": (r"val|dev", r"(val(id(ation)?)?|dev)$"),
    "test": (r"test|t10k", r"test(ing)?$"),
}


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
        """What identifies these images and labels, whatever files they came from."""
        hasher = hashlib.blake2b(repr(self.pixels.shape).encode(), digest_size=16)
        hasher.update(np.ascontiguousarray(self.pixels).data)
        hasher.update(b"" if self.labels is None else np.ascontiguousarray(self.labels).data)
        return hasher.hexdigest()

    def take(self, index) -> "Images":
        """Some of the images: a slice or an array of indices."""
        labels = None if self.labels is None else self.labels[index]
        return Images(self.pixels[index], labels, self.source)

    def split(self, held_out: int, seed: int = 0) -> tuple["Images", "Images"]:
        """All but `held_out` images, and those, picked at random by `seed`: a folder may be sorted by class."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.take(np.sort(order[held_out:])), self.take(np.sort(order[:held_out]))


def read_images(source: str, *, parts: Sequence[str] = ("train",)) -> Images:
    """The images of a source: `'digits'`, a file, or a folder, after which ':train', ':valid' or ':test' may stand.

    The names of a folder's files say which part they belong to; for pictures, that of the outermost folder. Where the
    source names none, the first of `parts` that there is is read; a folder without parts is read whole, 'digits' never is.
    The name of the folder that a picture lies in is its class. './digits' is a folder of that name.

    Raises UserError, in a sentence that names the file: no such source, nothing in it, files of several formats,
    a damaged file, images of several sizes.
    """
    path, wanted = part_of(source)
    if path == "digits":
        return read_digits(wanted or next((part for part in parts if part in DIGITS_PARTS), ""))
    where = Path(path).expanduser()
    if where.is_dir():
        return read_folder(where, wanted, parts)
    if not where.exists():
        raise UserError(f"{path}: no such file or folder; expected {KINDS}.")
    if wanted:
        raise UserError(f"{source} names a part of a file; only folders have parts. Leave ':{wanted}' out.")
    if (kind := format_of(where)) is None:
        raise UserError(f"{path} is no file of images by its name; expected {KINDS}.")
    return Images(*read_file(where, kind), source)


def parts_of(source: str) -> list[str]:
    """The parts that a source's folder has, by the names of its files; none of a file."""
    path, _ = part_of(source)
    folder = Path(path).expanduser()
    if path == "digits" or not folder.is_dir():
        return []
    by_part = parts_below(folder)[1]
    return [part for part in PARTS if part in by_part]


def part_of(source: str) -> tuple[str, str | None]:
    """'mnist:test' → ('mnist', 'test'); 'mnist' → ('mnist', None)."""
    path, colon, part = source.rpartition(":")
    return (path, part) if colon and part in PARTS else (source, None)


def part_named(name: str, *, folder: bool = False) -> str:
    """The part that a file of that name, or a folder, belongs to; '' for none."""
    return next((part for part, patterns in PARTS.items() if re.match(patterns[folder], name.lower())), "")


def parts_below(folder: Path) -> tuple[str, dict[str, list[Path]]]:
    """The format of a folder's images, and their files by part ('' for none).

    Files of the other formats lie in the folder itself, and pictures beside them are not what it holds; pictures
    alone may lie in folders of their own. The part of pictures is the outermost folder's, if that of each has one.
    """
    below = [path for path in sorted(folder.rglob("*")) if path.is_file() and format_of(path)]
    names = {path: path.relative_to(folder).parts for path in below}
    below = [path for path in below if not any(name.startswith(".") for name in names[path])]
    direct = [path for path in below if len(names[path]) == 1 and format_of(path) != "picture"]
    files = direct or [path for path in below if format_of(path) == "picture"]
    if not files:
        raise UserError(f"folder {folder} has no images in it; expected {KINDS}.")
    first = {format_of(path): path.name for path in reversed(files)}
    if len(first) > 1:
        kinds = ", ".join(f"{name} ({kind})" for kind, name in first.items())
        raise UserError(f"folder {folder} has images in several formats, {kinds}; expected one. Name a file instead.")
    by_part: dict[str, list[Path]] = {}
    for path in files:
        by_part.setdefault(part_named(names[path][0], folder=not direct), []).append(path)
    kind = next(iter(first)) or ""
    return kind, {"": files} if kind == "picture" and "" in by_part else by_part


def read_folder(folder: Path, wanted: str | None, parts: Sequence[str]) -> Images:
    kind, by_part = parts_below(folder)
    there = [part for part in PARTS if part in by_part]
    part = wanted or next((p for p in parts if p in there), "")
    if part not in by_part:
        missing = " or ".join(parts) if wanted is None else wanted
        raise UserError(
            f"folder {folder} has no part called {missing}; it has {', '.join(there) or 'none'}. Name the one that "
            f"is meant, as in {folder}:{there[0] if there else 'PART'}."
        )
    files = by_part[part]
    pixels, labels = zip(*(read_file(path, kind) for path in files), strict=True)
    for path, piece, some in zip(files, pixels, labels, strict=True):
        if piece.shape[1:] != pixels[0].shape[1:]:
            raise UserError(
                f"{path} has images of {size(piece.shape[1:])}, {files[0]} of {size(pixels[0].shape[1:])}; a source's "
                "images are all of one size. Resize or convert them."
            )
        if some is None and any(x is not None for x in labels):
            raise UserError(f"{path} has no labels, but other files of {folder} have; expected all or none to.")
    classes = None if labels[0] is None else np.concatenate(labels)
    if kind == "picture":
        classes = classes_of(folder, files, in_parts=bool(part))
    whole = pixels[0] if len(files) == 1 else np.concatenate(pixels)  # one file is not copied: it may take gigabytes
    return Images(whole, classes, f"{folder}:{part}" if part else str(folder))


def classes_of(folder: Path, paths: Sequence[Path], in_parts: bool) -> np.ndarray | None:
    """Labels by the names of the folders that pictures lie in; none where some lie in no folder but a part's."""
    homes = [path.parent for path in paths]
    if any(home == folder or (in_parts and home.parent == folder) for home in homes):
        return None
    names = sorted({home.name for home in homes})
    return np.array([names.index(home.name) for home in homes], np.int64)


def size(shape: Sequence[int]) -> str:
    """(28, 28, 1) → '28 × 28 pixels in grey'."""
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


def read_digits(part: str) -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 × 8: 17 shades, here spread over 0 to 255. The last tenth is 'test'."""
    if part not in DIGITS_PARTS:
        raise UserError("'digits' has the parts train and test, and no valid.")
    with needed_for("'digits'"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    cut = len(pixels) - len(pixels) // 10
    images = Images(pixels, digits.target.astype(np.int64), f"digits:{part}")
    return images.take(slice(cut) if part == "train" else slice(cut, None))
