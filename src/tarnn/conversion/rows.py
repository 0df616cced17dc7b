"""Texts as rows of ids, for a checkpoint of transformers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.conversion.options import attention_layers, child_of
from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.sources import read_documents
from tarnn.errors import UserError

LONGEST = 4096  # tokens of a row, where nobody says: the time of calibration grows with its square


def read_rows(
    sources: Sequence[str], tokenizer: Any, *, number: int, length: int, vocab_size: int, report: Callable[[str], None]
) -> list[Tensor]:
    """`number` rows of `length` ids (or of fewer, where documents are shorter), spread evenly over the sources.

    UserError for a tokenizer with ids beyond the model's vocabulary.
    """
    if number < 1 or length < 2:
        raise UserError(f"expected 1 text or more, of 2 tokens or more; got {number} of {length}.")
    found: list[Tensor] = []
    for document in read_documents(sources, log=report):
        if tokenizer is None:
            ids = torch.frombuffer(bytearray(document.data), dtype=torch.uint8).long()
            found += list(ids.split(length))
        else:
            text = document.data[: 16 * number * length].decode("utf-8", "replace")
            pieces = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
            pieces = [pieces] if pieces and isinstance(pieces[0], int) else pieces
            found += [torch.tensor(piece) for piece in pieces]
    whole = [row for row in found if len(row) == length] or found
    step = max(1, len(whole) // number)
    rows = whole[::step][:number]
    for row in rows:
        check_ids(row, vocab_size)
    return rows


def length_of_rows(model: Any, asked: int | None) -> int:
    """What was asked for, or the model's context, within reason. UserError for more than it reads."""
    most = getattr(model.config, "max_position_embeddings", None)
    if asked is not None and most and asked > most:
        raise UserError(f"--length {asked:,} is longer than this model's context; expected {most:,} tokens at most.")
    return asked if asked is not None else min(LONGEST, most or LONGEST)


def calibrated_length(model: Any) -> int | None:
    """How far the features of a converted model reach; None where nothing ends them."""
    lengths = [x.options.get("far_until") for x in map(child_of, attention_layers(model)) if x is not None]
    return min((x for x in lengths if x is not None), default=None)
