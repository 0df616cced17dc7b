"""Texts as rows of ids, for a model of transformers, and what it is called with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tarnn.conversion.options import converted_layers
from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.sources import read_documents
from tarnn.errors import UserError
from tarnn.log import Log

Row = Mapping[str, Tensor]  # what a model is called with: one text


def read_rows(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    number: int,
    length: int,
    vocab_size: int,
    log: Log,
) -> list[Tensor]:
    """`number` rows of `length` ids (or of fewer, if documents are shorter), spread evenly over the sources.

    UserError for a tokenizer with ids beyond the model's vocabulary.
    """
    if number < 1 or length < 2:
        raise UserError(f"expected 1 text or more, of 2 tokens or more; got {number} of {length}.")
    pieces: list[Tensor] = []
    for document in read_documents(sources, log=log):
        if tokenizer is None:
            ids = torch.frombuffer(bytearray(document.data), dtype=torch.uint8).long()
            pieces += list(ids.split(length))
        else:
            text = document.data[: 16 * number * length].decode("utf-8", "replace")
            options: dict[str, Any] = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
            ids = tokenizer(text, **options)["input_ids"]
            pieces += [torch.tensor(x) for x in ([ids] if ids and isinstance(ids[0], int) else ids)]
    whole = [row for row in pieces if len(row) == length] or pieces
    step = max(1, len(whole) // number)
    rows = whole[::step][:number]
    for row in rows:
        check_ids(row, vocab_size)
    return rows


def rows_of(
    texts: Sequence[Any] | Tensor, tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel
) -> list[Row]:
    """Each text as what the model is called with."""
    device = next(model.parameters()).device
    rows: list[Row] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("texts that are strings need a tokenizer: pass tokenizer=, or ids.")
            limit = getattr(model.config, "max_position_embeddings", None)
            ids = tokenizer(text, return_tensors="pt", truncation=limit is not None, max_length=limit).input_ids
            text = {"input_ids": ids}
        elif isinstance(text, Tensor):
            text = {"input_ids": text[None]}
        rows.append({name: x.to(device) for name, x in text.items()})
    if not rows:
        raise ValueError("calibration needs texts: 32 to 128 of them; got none.")
    return rows


def length_of(row: Row) -> int:
    """Tokens, or whatever its first tensor has along its second axis."""
    return next(iter(row.values())).shape[1]


def run_model(model: PreTrainedModel, row: Row) -> Any:
    """The model's outputs for a row."""
    options = {"use_cache": False} if model.can_generate() else {}
    return model(**row, **options)


def most_positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model reads; None: any number."""
    return getattr(model.config, "max_position_embeddings", None)


def calibrated_length(model: PreTrainedModel) -> int | None:
    """How far the features of a converted model reach; None if nothing ends them."""
    lengths = [layer.options.get("far_until") for layer in converted_layers(model).values()]
    return min((x for x in lengths if x is not None), default=None)
