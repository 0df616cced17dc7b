"""Text from wherever it lies: files, folders, globs, standard input, jsonl, `datasets`, a built-in corpus."""

import glob
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from tarnn.data.corpora import CORPORA
from tarnn.data.files import not_text, opened, plain_suffix
from tarnn.data.proteins import is_protein_file, read_proteins
from tarnn.errors import UserError

KINDS = (
    "a file, a folder, a glob, '-' for standard input, a .jsonl file, sequences as .fasta or .sto (files may be .gz, .bz2, "
    ".xz or .zst), "
    f"'datasets:NAME[:CONFIG[:SPLIT]]', or a built-in corpus ({', '.join(CORPORA)})"
)


class Document(NamedTuple):
    """One text, as bytes: whoever reads it decides whether they must be UTF-8."""

    name: str  # where it came from, for messages
    data: bytes


def read_documents(
    sources: Sequence[str], *, text_field: str = "text", report: Callable[[str], None] = lambda line: None
) -> Iterator[Document]:
    """The documents of all sources, in the order given; those of a folder or a glob by name.

    A folder stands for every file below it that is not hidden. Empty ones there are passed over, those that are not
    text too, and `report` gets a line about them; a file that was named is refused in both cases. Standard input is
    taken as it is. Of FASTA and Stockholm files each sequence is a document (`tarnn.data.proteins`). A built-in corpus
    wins over a file of the same name ('./NAME' is the file). `text_field` names the field that holds the text in jsonl
    lines and `datasets` rows.

    Raises UserError: no such source, nothing in it, a line that is not JSON, a field that is not there.
    """
    if not sources:
        raise UserError(f"no text was given; expected {KINDS}.")
    for source in sources:
        yield from read_source(source, text_field, report)


def read_source(source: str, text_field: str, report: Callable[[str], None]) -> Iterator[Document]:
    path = Path(source).expanduser()
    if source == "-":
        yield not_empty(Document("standard input", sys.stdin.buffer.read()))
    elif source in CORPORA:
        yield from (Document(f"{source}: {name}", data) for name, data in CORPORA[source]())
    elif source.startswith("datasets:"):
        yield from read_dataset(source, text_field)
    elif path.is_dir():
        yield from read_all(sorted(files_below(path)), f"folder {source}", text_field, report)
    elif path.exists():
        yield from read_file(path, text_field)
    elif glob.has_magic(source):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        yield from read_all(files, f"glob {source!r}", text_field, report)
    else:
        close = get_close_matches(source, CORPORA, n=1)
        hint = f" Did you mean the built-in corpus '{close[0]}'?" if close else ""
        raise UserError(f"{source}: no such file or folder; expected {KINDS}.{hint}")


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below `folder` whose path from there on has no hidden part."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def read_all(
    paths: Sequence[Path], where: str, text_field: str, report: Callable[[str], None]
) -> Iterator[Document]:
    """The files of a folder or a glob that hold text; at least one must."""
    left_out, found = [], False
    for path in paths:
        if not path.stat().st_size:
            continue
        try:
            yield from read_file(path, text_field)
            found = True
        except NotTextError:
            left_out.append(path.name)
    if left_out:
        names = ", ".join(left_out[:3]) + (" …" if len(left_out) > 3 else "")
        many = (
            f"{len(left_out):,} files of {where} that are"
            if len(left_out) > 1
            else f"a file of {where} that is"
        )
        report(f"left out: {many} not text: {names}")
    if not found:
        raise UserError(f"{where} has no files with text in them; expected at least one.")


class NotTextError(UserError):
    """A file holds something else than text."""


def read_file(path: Path, text_field: str) -> Iterator[Document]:
    if plain_suffix(path) == ".jsonl":
        yield from read_jsonl(path, text_field)
        return
    if is_protein_file(path):
        yield from (Document(x.place, x.sequence.encode()) for x in read_proteins(path))
        return
    with opened(path) as stream:
        data = stream.read()
    if what := not_text(data):
        raise NotTextError(
            f"{path} is not text but {what}; expected text. To train on its bytes all the same, pipe it: "
            f"`tarnn train - … < {path}`."
        )
    yield not_empty(Document(str(path), data))


def not_empty(document: Document) -> Document:
    if not document.data:
        raise UserError(f"{document.name} is empty; expected text to train on.")
    return document


def read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    """One document per line: the string under `text_field` of its JSON object. Blank lines are passed over."""
    found = False
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{name} is not JSON ({error}); a .jsonl file has one JSON object per line."
                ) from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{name} holds a JSON {type(row).__name__}; expected an object with a {text_field!r}."
                )
            yield text_of(row, text_field, name)
            found = True
    if not found:
        raise UserError(f"{path} is empty; expected one JSON object per line.")


def read_dataset(source: str, text_field: str) -> Iterator[Document]:
    """The texts in the rows of a Hugging Face dataset."""
    for number, row in enumerate(dataset_rows(source)):
        yield text_of(row, text_field, f"{source}, row {number}")


def dataset_rows(source: str) -> Any:
    """The rows of a Hugging Face dataset: `datasets:NAME[:CONFIG[:SPLIT]]`.

    NAME is anything that `datasets.load_dataset` takes, also a folder on disk; CONFIG may be left empty;
    SPLIT is `train` unless given.
    """
    name, config, split = [*source.split(":", 3)[1:], "", ""][:3]
    if not name:
        raise UserError(f"{source!r} does not name a dataset; expected 'datasets:NAME[:CONFIG[:SPLIT]]'.")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source} needs the package 'datasets': pip install 'tarnn[datasets]'.") from None
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # of many kinds, most of them not the package's own
        raise UserError(f"{source} could not be loaded: {type(error).__name__}: {error}") from error


def text_of(row: dict, text_field: str, name: str) -> Document:
    text = row.get(text_field)
    if not isinstance(text, str):
        got = (
            f"a {type(text).__name__}"
            if text_field in row
            else f"only {', '.join(map(repr, row)) or 'nothing'}"
        )
        raise UserError(
            f"{name} has {got} where the text was expected, in the field {text_field!r}; name the right one "
            "with --text-field."
        )
    try:
        return Document(name, text.encode())
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not text: {error.reason} (a lone half of a surrogate pair).") from None
