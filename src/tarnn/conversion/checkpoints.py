"""Checkpoints of transformers from a folder, and texts as rows of ids for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer

from tarnn.conversion.options import KEY
from tarnn.data.sources import read_documents
from tarnn.errors import UserError

LONGEST = 1024  # tokens of a row, where nobody says


def open_pretrained(folder: Path, *, converted: bool | None = False) -> Any:
    """The model of a folder, in the class that wrote it. converted: whether it must be, or must not be, converted; None:
    either.

    Raises UserError for a folder that holds none.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json there; expected the folder of a checkpoint of transformers, as save_pretrained "
            "writes it."
        )
    with reading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type.startswith("tarnn"):
        raise UserError(
            f"{folder}: a {config.model_type} checkpoint is linear already; a softmax model can be converted."
        )
    if converted not in (None, getattr(config, KEY, None) is not None):
        has, remedy = (
            ("not been", "`tarnn convert` makes one") if converted else ("been", "take the original")
        )
        raise UserError(f"{folder}: this checkpoint has {has} converted; {remedy}.")
    kind = getattr(transformers, (config.architectures or [""])[0], AutoModel)
    with reading(folder):
        return kind.from_pretrained(folder, local_files_only=True).eval()


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What transformers has to say of a folder that it can't read, in one sentence about that folder."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} can't be read as a checkpoint of transformers: {' '.join(str(error).split())[:300]}"
        ) from error


def tokenizer_of(folder: Path, model: Any) -> Any:
    """The folder's own; None for a model of bytes."""
    if any(folder.glob("tokenizer*")):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if model.config.vocab_size == 256:
        return None
    raise UserError(
        f"{folder}: no tokenizer there, and {model.config.vocab_size:,} tokens are no bytes; add its tokenizer.json."
    )


def read_rows(
    sources: Sequence[str], tokenizer: Any, *, number: int, length: int, report: Callable[[str], None]
) -> list[Tensor]:
    """`number` rows of `length` ids (or of fewer, where documents are shorter), spread evenly over the sources."""
    if number < 1 or length < 2:
        raise UserError(f"expected 1 text or more, of 2 tokens or more; got {number} of {length}.")
    found: list[Tensor] = []
    for document in read_documents(sources, report=report):
        if tokenizer is None:
            ids = torch.frombuffer(bytearray(document.data), dtype=torch.uint8).long()
            found += list(ids.split(length))
        else:
            text = document.data[: 16 * number * length].decode("utf-8", "replace")
            pieces = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)[
                "input_ids"
            ]
            pieces = [pieces] if pieces and isinstance(pieces[0], int) else pieces
            found += [torch.tensor(piece) for piece in pieces]
    whole = [row for row in found if len(row) == length] or found
    step = max(1, len(whole) // number)
    return whole[::step][:number]


def length_of_rows(model: Any, asked: int | None) -> int:
    """What was asked for, or as long as the model reads, within reason. UserError for more than it reads."""
    most = getattr(model.config, "max_position_embeddings", None)
    if asked is not None and most and asked > most:
        raise UserError(
            f"--length {asked:,} is longer than this model's context; expected {most:,} tokens at most."
        )
    return asked if asked is not None else min(LONGEST, most or LONGEST)
