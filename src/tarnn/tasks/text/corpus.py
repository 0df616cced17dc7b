"""A text made ready for training: split, tokenized, and kept as arrays of ids that are mapped, not read."""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tarnn.data.pairs import refuse_overlap
from tarnn.data.saved_tokenizer import open_saved_tokenizer
from tarnn.data.sources import Document
from tarnn.data.tokenizers import bpe_size, encode, make_tokenizer, pieces, token_bytes
from tarnn.errors import UserError
from tarnn.log import Log, silent, ticking
from tarnn.tasks.settings import held_out_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DESCRIPTION = "corpus.json"  # written last: a folder without it is not a corpus
VALIDATION_LIMIT = 1 << 18  # bytes, by default


@dataclass(frozen=True)
class Corpus:
    """Ids for training and for validation (perhaps none), and the tokenizer that made them."""

    tokenizer: "PreTrainedTokenizerFast"
    train: np.ndarray  # uint16, or uint32 for more than 65,536 ids
    validation: np.ndarray
    facts: dict[str, Any]  # digest, tokenizer; documents, bytes and tokens of each part

    @property
    def bytes_per_id(self) -> np.ndarray:
        """(vocab,) int64: the bytes that each id stands for."""
        return np.array([len(b) for b in token_bytes(self.tokenizer)], dtype=np.int64)

    @property
    def bytes_per_token(self) -> float:
        """Over the training text, the separators of documents counted as tokens of no bytes."""
        return self.facts["train"]["bytes"] / self.facts["train"]["tokens"]


def prepare(
    documents: Iterable[Document],
    folder: Path,
    *,
    tokenizer: str = "bytes",
    validation_fraction: float | None = None,
    validation_documents: Iterable[Document] | None = None,
    log: Log = silent,
) -> Corpus:
    """Split, tokenize and write a text to `folder`, which appears whole or not at all.

    Held out for validation is the end of the text, one stretch: its last `validation_fraction` (by default
    a tenth, at most 256 KB), or `validation_documents` where given. A tokenizer is trained on the rest alone:
    `tokenizer` is "bytes", "amino-acids", "bpe:N" or the folder of one that works on bytes.
    Each document is followed by <|endoftext|>.
    """
    is_trained = bpe_size(tokenizer) is not None
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if is_trained:
        documents = utf8_only(documents)
        validation_documents = None if validation_documents is None else utf8_only(validation_documents)
    with ticking("reading the text", log, lambda: f"{file_size(partial / 'text'):,} bytes so far"):
        text = spool(documents, partial / "text")
    if validation_documents is not None:
        held_out, cut = spool(validation_documents, partial / "validation-text"), len(text.data)
        refuse_overlap(text.digests, held_out.digests, "documents", log)
    else:
        held_out, cut = text, cut_before(text.data, validation_fraction)
    with ticking(f"training a tokenizer on {cut:,} bytes", log) if is_trained else nullcontext():
        tokens = make_tokenizer(tokenizer, (data for data, _ in text.documents(0, cut)))
    facts: dict[str, Any] = {"digest": text.digest, "tokenizer": tokenizer}
    count = {"documents": 0, "bytes": 0, "tokens": 0}
    with ticking(f"turning {cut:,} bytes into tokens", log, lambda: f"{count['bytes']:,} done"):
        facts["train"] = write_ids(tokens, text.documents(0, cut), partial / "train.ids", count)
    start = cut if held_out is text else 0
    facts["validation"] = write_ids(
        tokens, held_out.documents(start, len(held_out.data)), partial / "validation.ids", dict.fromkeys(count, 0)
    )
    if held_out is not text:
        facts["validation"]["digest"] = held_out.digest
        (partial / "validation-text").unlink()
    (partial / "text").unlink()
    tokens.save_pretrained(partial / "tokenizer")
    (partial / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n")
    partial.rename(folder)
    return load(folder)


def load(folder: Path) -> Corpus:
    """Load a corpus that `prepare` wrote; the ids are mapped from disk."""
    facts = json.loads((folder / DESCRIPTION).read_text())
    tokenizer = open_saved_tokenizer(folder / "tokenizer")
    train, validation = (mapped(folder / name, len(tokenizer)) for name in ("train.ids", "validation.ids"))
    return Corpus(tokenizer, train, validation, facts)


def load_validation(folder: Path) -> np.ndarray:
    """Load the ids that a corpus holds out; without transformers, as the tokenizer is looked at alone."""
    from tarnn.decoding.tokenizer import open_tokenizer

    return mapped(folder / "validation.ids", len(open_tokenizer(folder / "tokenizer")))


def mapped(part: Path, num_ids: int) -> np.ndarray:
    """Map the ids in a file."""
    dtype = id_dtype(num_ids)
    return np.memmap(part, dtype=dtype, mode="r") if part.stat().st_size else np.zeros(0, dtype)


def utf8_only(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents; UserError at the first that is not UTF-8, with its name and the place."""
    for document in documents:
        for _ in pieces(document.data, document.name):
            pass
        yield document


class Spool(NamedTuple):
    """All documents one after the other in a file, and where each ends: little is held in memory."""

    data: np.ndarray  # uint8, mapped
    ends: array
    digest: str
    digests: list[bytes]  # of each document

    def documents(self, start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
        """Yield the parts of documents in [start, stop), each with whether it reaches the document's end."""
        at = start
        for end in self.ends:
            if at < end and at < stop:
                yield self.data[at : min(end, stop)].tobytes(), end <= stop
                at = end


def spool(documents: Iterable[Document], path: Path) -> Spool:
    ends, total, identity, digests = array("q"), 0, Digest(), []
    with path.open("wb") as file:
        for document in documents:
            identity.add(document)
            digests.append(hashlib.blake2b(document.data, digest_size=16).digest())
            file.write(document.data)
            total += len(document.data)
            ends.append(total)
    if not total:
        raise UserError("there is no text: all documents are empty.")
    return Spool(np.memmap(path, dtype=np.uint8, mode="r"), ends, identity.hex(), digests)


class Digest:
    """Hash of a text: of all documents, and of where each ends."""

    def __init__(self, documents: Iterable[Document] = ()):
        self._hasher = hashlib.blake2b(digest_size=16)
        for document in documents:
            self.add(document)

    def add(self, document: Document) -> None:
        self._hasher.update(len(document.data).to_bytes(8, "little") + document.data)

    def hex(self) -> str:
        return self._hasher.hexdigest()


def cut_before(data: np.ndarray, fraction: float | None) -> int:
    """Where the held-out end begins: never inside a UTF-8 character."""
    held_out = held_out_count(len(data), fraction, VALIDATION_LIMIT)
    held_out = 0 if held_out == 1 else held_out  # one byte is nothing to guess from
    cut = len(data) - held_out
    while 0 < cut < len(data) and 0x80 <= data[cut] < 0xC0 and len(data) - held_out - cut < 3:
        cut -= 1
    return cut


def id_dtype(num_ids: int) -> np.dtype:
    return np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32)


def write_ids(
    tokenizer: "PreTrainedTokenizerFast", documents: Iterable[tuple[bytes, bool]], path: Path, count: dict[str, int]
) -> dict[str, int]:
    """The ids of documents, each that is whole followed by <|endoftext|>; adds what was written to `count`."""
    dtype = id_dtype(len(tokenizer))
    separator = np.array([tokenizer.eos_token_id])
    with path.open("wb") as file:
        for data, whole in documents:
            count["documents"] += 1
            ids = np.concatenate([encode(tokenizer, data), separator[:whole]]).astype(dtype)
            file.write(ids.tobytes())
            count["bytes"] += len(data)
            count["tokens"] += len(ids)
    return count


def ids_of(tokenizer: "PreTrainedTokenizerFast", documents: Iterable[Document]) -> np.ndarray:
    """The ids of all documents in a row, each followed by <|endoftext|>, in memory."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [x for each in documents for x in (encode(tokenizer, each.data, each.name), np.array(end, np.int64))]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(id_dtype(len(tokenizer)))


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
