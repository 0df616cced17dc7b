"""Text from wherever it lies: files, folders, globs, standard input, jsonl, `datasets`, a built-in corpus."""

import glob
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from tarnn.data.files import Row, field_of, not_text, opened, plain_suffix, read_rows
from tarnn.data.proteins import is_protein_file, read_proteins
from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.log import Log, silent

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def python_docs() -> Iterator[tuple[str, bytes]]:
    """The language reference and documentation in `pydoc_data.topics`, by name: about half a megabyte."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python has no pydoc_data.topics, so no 'python-docs'; give a text of yours.") from None
    for name in sorted(topics):
        yield name, topics[name].encode()


def python_stdlib() -> Iterator[tuple[str, bytes]]:
    """The sources of the standard library without its tests, by path: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if NOT_LIBRARY.isdisjoint(p.relative_to(root).parts)]
    if not paths:
        raise UserError(f"this Python has no sources in {root}, so no 'python-stdlib'; give a text of yours.")
    for path in paths:
        if path.stat().st_size:
            yield str(path.relative_to(root)), path.read_bytes()


# name → a function that yields (name of the document, its bytes)
CORPORA: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "python-docs": python_docs,
    "python-stdlib": python_stdlib,
}


KINDS = (
    "a file, a folder, a glob, '-' for standard input, a .jsonl or .csv file, sequences as .fasta or .sto (files may be .gz, "
    ".bz2, .xz or .zst), "
    f"'datasets:NAME[:CONFIG[:SPLIT]]', or a built-in corpus ({', '.join(CORPORA)})"
)

# files of a folder that are about its texts, and none of them
ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|changelog)([-.].*)?", re.IGNORECASE)


class Document(NamedTuple):
    """One text, as bytes: whoever reads it decides whether they must be UTF-8."""

    name: str  # where it came from, for messages
    data: bytes


def read_documents(sources: Sequence[str], *, text_field: str = "text", log: Log = silent) -> Iterator[Document]:
    """The documents of all sources, in the order given; those of a folder or a glob by name.

    A folder stands for every file below it that is not hidden and no README, LICENSE or the like. Empty ones there are
    passed over, those that are not text too, and `log` gets a line about them; a file that was named is refused in both
    cases. Standard input is taken as it is. Of FASTA and Stockholm files each sequence is a document
    (`tarnn.data.proteins`). A built-in corpus wins over a file of the same name ('./NAME' is the file). `text_field` names
    the field that holds the text in jsonl lines, .csv rows and `datasets` rows.

    Raises UserError: no such source, nothing in it, a line that is not JSON, a field that is not there.
    """
    if not sources:
        raise UserError(f"no text was given; expected {KINDS}.")
    for source in sources:
        yield from read_source(source, text_field, log)


def read_source(source: str, text_field: str, log: Log) -> Iterator[Document]:
    path = Path(source).expanduser()
    if source == "-":
        yield not_empty(Document("standard input", sys.stdin.buffer.read()))
    elif source in CORPORA:
        yield from (Document(f"{source}: {name}", data) for name, data in CORPORA[source]())
    elif source.startswith("datasets:"):
        yield from texts_of(dataset_rows(source), text_field)
    elif path.is_dir():
        yield from read_all(sorted(files_below(path)), f"folder {source}", text_field, log)
    elif path.exists():
        yield from read_file(path, text_field)
    elif glob.has_magic(source):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file() and not match.name.startswith(".")]
        yield from read_all(files, f"glob {source!r}", text_field, log)
    else:
        close = get_close_matches(source, CORPORA, n=1)
        hint = f" Did you mean the built-in corpus '{close[0]}'?" if close else ""
        raise UserError(f"{source}: no such file or folder; expected {KINDS}.{hint}")


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below `folder` whose path from there on has no hidden part."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def read_all(paths: Sequence[Path], where: str, text_field: str, log: Log) -> Iterator[Document]:
    """The files of a folder or a glob that hold text, at least one; those about the texts count where no other does."""
    left_out, found = [], False
    about = [path for path in paths if ABOUT.fullmatch(path.name)]
    for path in (*(path for path in paths if path not in about), *about):
        if found and path in about:
            break
        if not path.stat().st_size:
            continue
        try:
            yield from read_file(path, text_field)
            found = True
        except NotTextError:
            left_out.append(path.name)
    if left_out:
        names = ", ".join(left_out[:3]) + (" …" if len(left_out) > 3 else "")
        many = f"{len(left_out):,} files of {where} that are" if len(left_out) > 1 else f"a file of {where} that is"
        log(f"left out: {many} not text: {names}")
    if not found:
        raise UserError(f"{where} has no files with text in them; expected at least one.")


class NotTextError(UserError):
    """A file holds something else than text."""


def read_file(path: Path, text_field: str) -> Iterator[Document]:
    if plain_suffix(path) in (".jsonl", ".csv"):  # a text for each row
        yield from texts_of(read_rows(path), text_field)
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


def texts_of(rows: Iterator[tuple[str, Row]], text_field: str) -> Iterator[Document]:
    """The field that holds the text, of each row."""
    for place, row in rows:
        yield Document(place, field_of(row, text_field, place, "--text-field").encode())


def dataset_rows(source: str) -> Iterator[tuple[str, Row]]:
    """(its place, for messages, the row) of a Hugging Face dataset: `datasets:NAME[:CONFIG[:SPLIT]]`.

    NAME is anything that `datasets.load_dataset` takes, also a folder on disk; CONFIG may be left empty;
    SPLIT is `train` unless given.
    """
    name, config, split = [*source.split(":", 3)[1:], "", ""][:3]
    if not name:
        raise UserError(f"{source!r} does not name a dataset; expected 'datasets:NAME[:CONFIG[:SPLIT]]'.")
    with needed_for(source):
        import datasets
    away = not Path(name).exists() and hub_is_away()
    try:
        with offline(datasets) if away else nullcontext():
            rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # of many kinds, most of them not the package's own
        if away:
            raise UserError(
                f"{source} is not on this machine, and the Hugging Face Hub can't be reached from here; give a file or a folder."
            ) from error
        raise UserError(f"{source} could not be loaded: {type(error).__name__}: {error}") from error
    yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows))


def hub_is_away() -> bool:
    """Whether the hub does not answer within seconds: the packages that load from it try for minutes."""
    if getproxies():  # which only they know how to use
        return False
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError:
        return True
    return False


@contextmanager
def offline(datasets: Any) -> Iterator[None]:
    """Load from the cache alone, within."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
