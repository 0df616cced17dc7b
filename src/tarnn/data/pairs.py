"""Pairs of texts from files: a label and a text to classify, or a sequence and what it becomes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tarnn.data.files import not_text, opened, plain_suffix
from tarnn.errors import UserError

KINDS = (
    "a .tsv file (two columns or more: the first and the last count), a .jsonl file (either may be .gz, .bz2, .xz or .zst) "
    "or 'datasets:NAME[:CONFIG[:SPLIT]]'"
)


class Pair(NamedTuple):
    """Two texts, and the file and line that they are from, for messages."""

    first: str
    last: str
    place: str


def read_pairs(sources: Sequence[str], first: str, last: str) -> Iterator[Pair]:
    """The pairs of all sources in the order given: of a .tsv file its first and last column, of .jsonl lines and
    `datasets` rows the fields called `first` and `last`.

    Raises UserError, with file and line, for a line without two columns or fields, one that is empty, what is not UTF-8
    or JSON, a damaged file, and a source with no pair in it.
    """
    for source in sources:
        found = False
        for pair in _read(source, first, last):
            found = True
            for name, text in ((first, pair.first), (last, pair.last)):
                if not text:
                    raise UserError(f"{pair.place}: the {name} is empty; correct the line, or remove it.")
            yield pair
        if not found:
            raise UserError(f"{source} is empty; expected {KINDS}.")


def _read(source: str, first: str, last: str) -> Iterator[Pair]:
    if source.startswith("datasets:"):
        yield from _of_dataset(source, first, last)
        return
    path = Path(source).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{source} {what}; expected {KINDS}.")
    lines = _lines(path)
    if plain_suffix(path) == ".jsonl":
        for place, line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{place} is not JSON ({error}); a .jsonl file has one object per line."
                ) from None
            yield _of_fields(row, first, last, place)
        return
    for place, line in lines:
        columns = line.split("\t")
        if len(columns) < 2:
            raise UserError(
                f"{place} has no tab; expected the {first} and the {last} with a tab between them, or a .jsonl file."
            )
        yield Pair(columns[0].strip(), columns[-1].strip(), place)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line for messages, the line) of all that are not blank."""
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{path}, line {number}"
            if what := not_text(line):
                raise UserError(f"{place} is not text but {what}; expected {KINDS}.")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{place} is not UTF-8 ({error.reason}); convert the file.") from None
            if text.strip():
                yield place, text.rstrip("\r\n")


def _of_fields(row: object, first: str, last: str, place: str) -> Pair:
    if not isinstance(row, dict):
        raise UserError(f"{place} holds a JSON {type(row).__name__}; expected an object.")
    values = []
    for name in (first, last):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            got = (
                f"a {type(value).__name__}"
                if name in row
                else f"only {', '.join(map(repr, row)) or 'nothing'}"
            )
            raise UserError(f"{place} has {got} where a text was expected, in the field {name!r}.")
        values.append(str(value))
    return Pair(values[0], values[1], place)


def _of_dataset(source: str, first: str, last: str) -> Iterator[Pair]:
    from tarnn.data.sources import dataset_rows

    for number, row in enumerate(dataset_rows(source)):
        yield _of_fields(row, first, last, f"{source}, row {number}")


def digest(pairs: Iterable[Pair]) -> str:
    """What identifies them: a hash over both texts of each, in order."""
    identity = hashlib.sha256()
    for pair in pairs:
        for text in pair[:2]:
            data = text.encode("utf-8", "surrogatepass")
            identity.update(len(data).to_bytes(8, "little") + data)
    return identity.hexdigest()
