"""Pairs of texts from files: a label and a text to classify, or a recording and what is said."""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tarnn.data.files import Row, field_of, read_rows
from tarnn.data.sources import dataset_rows
from tarnn.errors import UserError
from tarnn.log import Log

KINDS = (
    "a .tsv file (two columns or more: the first and the last count), a .jsonl file, a .csv file with a header (each may be "
    ".gz, .bz2, .xz or .zst) "
    "or 'datasets:NAME[:CONFIG[:SPLIT]]'"
)


class Pair(NamedTuple):
    """Two texts, and the file and line that they are from, for messages."""

    first: str
    last: str
    place: str


def read_pairs(sources: Sequence[str], first: str, last: str, options: tuple[str, str] = ("", "")) -> Iterator[Pair]:
    """The pairs of all sources in the order given: of a .tsv file its first and last column, of .jsonl lines, .csv
    and `datasets` rows the fields called `first` and `last`. options: that name others than these, for messages.

    Raises UserError, with file and line, for a line without two columns or fields, one that is empty, what is not UTF-8
    or JSON, a damaged file, and a source with no pair in it.
    """
    for source in sources:
        pair = None
        for pair in _read(source, first, last, options):
            for name, text in ((first, pair.first), (last, pair.last)):
                if not text:
                    raise UserError(f"{pair.place}: the {name} is empty; correct the line, or remove it.")
            yield pair
        if pair is None:
            raise UserError(f"{source} is empty; expected {KINDS}.")


def rows_of(source: str, expected: str = KINDS) -> Iterator[tuple[str, Row]]:
    """(its place, for messages, the row) of a file or of `datasets:…`; UserError where there is no such file."""
    if source.startswith("datasets:"):
        return dataset_rows(source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"{source} {'is a folder' if path.is_dir() else 'does not exist'}; expected {expected}.")
    return read_rows(path)


def _read(source: str, first: str, last: str, options: tuple[str, str]) -> Iterator[Pair]:
    for place, row in rows_of(source):
        if isinstance(row, dict):
            names = zip((first, last), options, strict=True)
            one, other = (field_of(row, name, place, option, numbers=True) for name, option in names)
            yield Pair(one, other, place)
        elif len(row) < 2:
            raise UserError(
                f"{place} has no tab; expected the {first} and the {last} with a tab between them, or a .jsonl or .csv file."
            )
        else:
            yield Pair(row[0].strip(), row[-1].strip(), place)


def digest(pairs: Iterable[Pair]) -> str:
    """Hash both texts of all pairs, in order."""
    identity = hashlib.sha256()
    for pair in pairs:
        for text in pair[:2]:
            data = text.encode("utf-8", "surrogatepass")
            identity.update(len(data).to_bytes(8, "little") + data)
    return identity.hexdigest()


def refuse_overlap(train: Sequence[Hashable], held_out: Sequence[Hashable], what: str, log: Log) -> None:
    """UserError where the model is trained on all of --val, which then measures nothing; where on some, `log` says so."""
    seen = set(train)
    common = sum(each in seen for each in held_out)
    if held_out and common == len(held_out):
        raise UserError(
            f"all {what} of --val ({common:,}) are among those to train on, so the validation would measure nothing; leave them "
            "out of one of the two, or let --val-fraction hold a part out."
        )
    if common:
        log(f"tarnn: {common:,} of the {len(held_out):,} {what} of --val are among those to train on, too")
