"""Files of text: decompressed where they are compressed, and their rows: .jsonl objects, .csv rows, .tsv columns."""

import bz2
import csv
import gzip
import io
import json
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
    """Name what `data` are instead of text; None if they seem to be text."""
    if data.startswith(b"%PDF-"):
        return "a PDF document"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text in UTF-16"
    return "binary data (it has zero bytes)" if b"\0" in data[:LOOKED_AT] else None


TABLES = (".jsonl", ".csv", ".tsv")
Row = dict[str, object] | list[str]


def is_table(path: Path) -> bool:
    """Whether a file's name says that it holds rows; compressed ones may, too."""
    return plain_suffix(path) in TABLES


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(file and line for messages, the row) of all lines that are not blank: a dict by field, of a .tsv file a list.

    Raises UserError, with file and line, for what is not UTF-8 or JSON, a row of another length than its header, and a
    file with no row in it.
    """
    kind, found = plain_suffix(path), False
    rows = {".jsonl": _objects, ".csv": _by_header}.get(kind, _columns)(path)
    for place, row in rows:
        found = True
        yield place, row
    if not found:
        raise UserError(f"{path} is empty; expected a row on each line.")


def field_of(row: Row, name: str, place: str, option: str = "", *, numbers: bool = False) -> str:
    """The text of a field; with `numbers` whole ones count as text. UserError, with the place, where there is none."""
    value = row.get(name) if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int if numbers else str):
        hint = f"; name the right one with {option}" if option else ""
        if name not in row:
            raise UserError(f"{place} has no field {name!r}, only {', '.join(map(repr, row)) or 'nothing'}{hint}.")
        kind = type(value).__name__
        raise UserError(f"{place} has a {kind} where the text was expected, in the field {name!r}{hint}.")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place} is not text: {error.reason} (a lone half of a surrogate pair).") from None
    return str(value)


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line for messages, the line) of all that are not blank."""
    for place, line in _decoded(path):
        if line.strip():
            yield place, line.rstrip("\r\n")


def _decoded(path: Path) -> Iterator[tuple[str, str]]:
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{path}, line {number}"
            if what := not_text(line):
                raise UserError(f"{place} is not text but {what}.")
            try:
                yield place, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{place} is not UTF-8 ({error.reason}); convert the file.") from None


def _columns(path: Path) -> Iterator[tuple[str, Row]]:
    yield from ((place, line.split("\t")) for place, line in lines_of(path))


def _objects(path: Path) -> Iterator[tuple[str, Row]]:
    for place, line in lines_of(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not JSON ({error}); a .jsonl file has one JSON object per line.") from None
        if not isinstance(row, dict):
            raise UserError(f"{place} holds a JSON {type(row).__name__}; expected an object.")
        yield place, row


def _by_header(path: Path) -> Iterator[tuple[str, Row]]:
    reader = csv.DictReader((line for _, line in _decoded(path)), strict=True)
    try:
        reader.fieldnames = names = [name.strip() for name in reader.fieldnames or []]
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(
                    f"{place} has another number of values than the {len(names)} columns of the header ({', '.join(names[:6])})."
                )
            yield place, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num} is no row of a .csv file: {error}.") from None
