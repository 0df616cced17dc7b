"""Rows of files: the objects of .jsonl lines, the rows of .csv with its header's names, the columns of .tsv lines."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from tarnn.data.files import not_text, opened, plain_suffix
from tarnn.errors import UserError

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
        got = f"a {type(value).__name__}" if name in row else f"only {', '.join(map(repr, row)) or 'nothing'}"
        hint = f"; name the right one with {option}" if option else ""
        raise UserError(f"{place} has {got} where the text was expected, in the field {name!r}{hint}.")
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
