"""The bytes of a text file: decompressed where it is compressed, and whether they are text at all."""

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tarnn.errors import UserError
from tarnn.extras import needed_for


def open_zstd(path: Path, _mode: str) -> Any:
    with needed_for(str(path)):
        import zstandard
    data, parts = path.read_bytes(), []
    while data:  # frame after frame: the package's own stream takes a file that was cut short for a whole one
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(data))
        if not frame.eof:
            raise EOFError("it ends too early")
        data = frame.unused_data
    return io.BytesIO(b"".join(parts))


# how the bytes of a compressed file begin → its name, and what opens it
COMPRESSED: dict[bytes, tuple[str, Callable[[Path, str], Any]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    b"\x28\xb5\x2f\xfd": ("zstd", open_zstd),
}
SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
LOOKED_AT = 1 << 16  # bytes


# how names of files end that a user may have mistyped
NAMED = re.compile(r".*\.(txt|md|csv|tsv|json|jsonl|html|fasta|sto|wav|gz|bz2|xz|zst)|\S*[/\\]\S*\w|\S+\.[a-z]{2,5}")


def looks_like_path(text: str) -> bool:
    """Whether a text was rather meant as the name of a file: it ends as such names do, or has a slash and no space."""
    return len(text) < 4096 and NAMED.fullmatch(text) is not None


def is_file(text: str) -> bool:
    """Whether there is a file of that name; what can't be a name is none."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL in it
        return False


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file as a stream, decompressed. UserError where it is damaged."""
    if path.is_char_device():  # /dev/zero has no end
        raise UserError(f"{path} is a device; expected a file.")
    with path.open("rb") as file:
        begins = file.read(8)
    name, opener = next((x for begin, x in COMPRESSED.items() if begins.startswith(begin)), ("", Path.open))
    try:
        with opener(path, "rb") as stream:
            yield stream
    except UserError:
        raise
    except Exception as error:  # zlib, bz2, lzma and zstandard each have their own
        if not name:
            raise
        raise UserError(
            f"{path} can't be decompressed as {name} ({' '.join(str(error).split())}); it is damaged or cut "
            "short. Take an intact copy."
        ) from error


def plain_suffix(path: Path) -> str:
    """The suffix under that of a compression: .jsonl of a.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix


def not_text(data: bytes) -> str | None:
    """What `data` are instead of text; None where they seem to be text."""
    if data.startswith(b"%PDF-"):
        return "a PDF document"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text in UTF-16"
    return "binary data (it has zero bytes)" if b"\0" in data[:LOOKED_AT] else None
