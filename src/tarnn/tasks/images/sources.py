"""Images from wherever they lie: MNIST's idx files, npz, CIFAR-10, ImageNet64, folders of pictures, scikit-learn's digits.

All images of a source are held in memory, a byte for each channel of each pixel (all of ImageNet64: 15.7 GB; name
some of its batches for less).
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.tasks.images import files
from tarnn.tasks.images.files import Pixels

DIGITS_PARTS = ("train", "test")
SPLITS = ("train", "valid", "test")
KINDS = (
    "a folder or file of idx (MNIST), npz, CIFAR-10 or ImageNet64 batches, PNG or JPEG pictures, or 'digits' "
    "(scikit-learn's 8 × 8 digits); ':train', ':valid' or ':test' after a folder names one of its parts"
)
# what a file's name says of its format and of its part
FORMATS: dict[str, tuple[str, Callable[[Path], Pixels]]] = {
    "idx": (r"images[-.]idx[34]-ubyte(\.gz)?$", files.read_idx_images),
    "npz": (r"\.npz$", files.read_npz),
    "CIFAR-10 binary": (r"^(data|test)_batch(_\d+)?\.bin$", files.read_cifar_binary),
    "pickled batches": (r"^((train_)?data_batch_\d+|test_batch|val_data)$", files.read_pickle),
    "pictures": (r"\.(png|jpe?g)$", files.read_picture),
}
# how a file's name begins
PARTS = {"train": r"^train|^data_batch", "valid": r"^val|^dev", "test": r"^test|^t10k"}
PART_FOLDERS = {"train": r"train(ing)?", "valid": r"val(id(ation)?)?|dev", "test": r"test(ing)?"}


@dataclass(frozen=True)
class Images:
    """Images of one size, uint8 (n, height, width, channels), and their classes, int64 (n,), where they are known."""

    pixels: np.ndarray
    labels: np.ndarray | None
    source: str
    class_names: tuple[str, ...] = ()

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
        return Images(self.pixels[index], labels, self.source, self.class_names)

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
    reader = FORMATS[format_or_refuse(where)][1]
    return Images(*reader(where), source)


def parts_of(source: str) -> list[str]:
    """The parts that a source's folder has, by the names of its files; none of a file."""
    path, _ = part_of(source)
    folder = Path(path).expanduser()
    if path == "digits" or not folder.is_dir():
        return []
    by_part = parts_below(folder)[1]
    return [part for part in SPLITS if part in by_part]


def part_of(source: str) -> tuple[str, str | None]:
    """'mnist:test' → ('mnist', 'test'); 'mnist' → ('mnist', None)."""
    path, colon, part = source.rpartition(":")
    return (path, part) if colon and part in SPLITS else (source, None)


def format_of(path: Path) -> str | None:
    return next((name for name, (pattern, _) in FORMATS.items() if re.search(pattern, path.name.lower())), None)


def format_or_refuse(path: Path) -> str:
    if (kind := format_of(path)) is None:
        raise UserError(f"{path} is no file of images by its name; expected {KINDS}.")
    return kind


def part_of_file(path: Path) -> str:
    """The part that a file's name speaks of, '' for none."""
    return next((part for part, begins in PARTS.items() if re.search(begins, path.name.lower())), "")


def part_folder(name: str) -> str:
    """The part that a folder of that name holds, '' for none."""
    return next((part for part, names in PART_FOLDERS.items() if re.fullmatch(names, name.lower())), "")


def parts_below(folder: Path) -> tuple[str, dict[str, list[Path]]]:
    """The format of a folder's images, and their files by part ('' for none).

    Files of the other formats lie in the folder itself, and pictures beside them are not what it holds; pictures
    alone may lie in folders of their own.
    """
    direct = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    kinds = {kind: found for kind in FORMATS if (found := [p for p in direct if format_of(p) == kind])}
    kinds.pop("pictures", None)
    if not kinds:
        pictures = [p for p in sorted(folder.rglob("*")) if format_of(p) == "pictures" and p.is_file()]
        hidden = [any(part.startswith(".") for part in p.relative_to(folder).parts) for p in pictures]
        kinds = {"pictures": [p for p, skip in zip(pictures, hidden, strict=True) if not skip]}
    (kind, found), *others = kinds.items()
    if not found:
        raise UserError(f"folder {folder} has no images in it; expected {KINDS}.")
    if others:
        told = ", ".join(f"{found[0].name} ({kind})" for kind, found in kinds.items())
        raise UserError(f"folder {folder} has images in several formats, {told}; expected one. Name a file instead.")
    return kind, pictures_by_part(folder, found) if kind == "pictures" else files_by_part(found)


def read_folder(folder: Path, wanted: str | None, parts: Sequence[str]) -> Images:
    kind, by_part = parts_below(folder)
    there = [part for part in SPLITS if part in by_part]
    part = wanted or next((p for p in parts if p in there), "")
    if part not in by_part:
        asked = " or ".join(parts) if wanted is None else wanted
        raise UserError(
            f"folder {folder} has no part called {asked}; it has {', '.join(there) or 'none'}. Name the one that "
            f"is meant, as in {folder}:{there[0] if there else 'PART'}."
        )
    name = f"{folder}:{part}" if part else str(folder)
    pieces = [FORMATS[kind][1](path) for path in by_part[part]]
    if kind == "pictures":
        labels, class_names = classes_of(folder, by_part[part], in_parts=bool(part))
        return Images(join(by_part[part], pieces), labels, name, class_names)
    return Images(join(by_part[part], pieces), join_labels(folder, by_part[part], pieces), name)


def files_by_part(paths: Sequence[Path]) -> dict[str, list[Path]]:
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        by_part.setdefault(part_of_file(path), []).append(path)
    return by_part


def pictures_by_part(folder: Path, paths: Sequence[Path]) -> dict[str, list[Path]]:
    """By the outermost folder's name; all together unless each picture lies in one that is called like a part."""
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        by_part.setdefault(part_folder(path.relative_to(folder).parts[0]), []).append(path)
    return {"": list(paths)} if "" in by_part else by_part


def classes_of(folder: Path, paths: Sequence[Path], in_parts: bool) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels by the names of the folders that pictures lie in; none where some lie in no folder but a part's."""
    homes = [path.parent for path in paths]
    if any(home == folder or (in_parts and home.parent == folder) for home in homes):
        return None, ()
    names = sorted({home.name for home in homes})
    return np.array([names.index(home.name) for home in homes], np.int64), tuple(names)


def join(paths: Sequence[Path], pieces: Sequence[Pixels]) -> np.ndarray:
    """The images of all files, which must be of one size."""
    first = pieces[0].pixels.shape[1:]
    for path, piece in zip(paths, pieces, strict=True):
        if piece.pixels.shape[1:] != first:
            raise UserError(
                f"{path} has images of {size(piece.pixels.shape[1:])}, {paths[0]} of {size(first)}; a source's images "
                "are all of one size. Resize or convert them."
            )
    return pieces[0].pixels if len(pieces) == 1 else np.concatenate([piece.pixels for piece in pieces])


def join_labels(folder: Path, paths: Sequence[Path], pieces: Sequence[Pixels]) -> np.ndarray | None:
    """The labels of all files: all have them, or none has."""
    bare = [path for path, piece in zip(paths, pieces, strict=True) if piece.labels is None]
    if bare and len(bare) < len(paths):
        raise UserError(f"{bare[0]} has no labels, but other files of {folder} have; expected all or none to.")
    return None if bare else np.concatenate([piece.labels for piece in pieces if piece.labels is not None])


def size(shape: Sequence[int]) -> str:
    """(28, 28, 1) → '28 × 28 pixels in grey'."""
    return f"{shape[0]} × {shape[1]} pixels in {'grey' if shape[2] == 1 else 'colour'}"


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
