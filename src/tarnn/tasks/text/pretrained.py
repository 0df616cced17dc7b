"""A text as a trained language model is measured on it: ids by whatever tokenizer the model has, in windows, with their bytes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.sources import Document
from tarnn.decoding.tokenizer import SavedTokenizer
from tarnn.errors import UserError
from tarnn.numerics import widest
from tarnn.tasks.text.windows import IGNORED, ValidationBatches

LONGEST = 4096  # tokens of a row by default: the time of calibration grows with its square


class PretrainedText:
    """Documents as ids in a row, each with the special tokens that the tokenizer adds, in windows of `context`.

    Every token but the first is a target once. The bytes are those of the documents themselves, so they are exact for any
    tokenizer. tokenizer: None for a model of bytes.
    """

    of, unit, rates = "text", "bits_per_byte", ()

    def __init__(self, tokenizer: Any, documents: Iterable[Document], context: int, vocab_size: int):
        parts: list[np.ndarray] = []
        self.num_bytes = 0
        for document in documents:
            ids, lead = ids_of(tokenizer, document)
            self.num_bytes += len(document.data) - (0 if parts else lead)
            parts.append(ids)
        self.ids = np.concatenate([np.zeros(0, np.int64), *parts])
        if len(self.ids) < 2:
            raise UserError("the text has fewer than two tokens; expected more text to measure on.")
        check_ids(self.ids, vocab_size)
        self.context = min(context, len(self.ids) - 1)

    def validation(self, batch_size: int) -> ValidationBatches:
        return ValidationBatches(self.ids, self.context, batch_size)

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """(nats, tokens, bytes); the batch has its share of the text's bytes, by its tokens."""
        targets = batch["targets"].flatten()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float().flatten(0, 1)
        nats = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").to(widest(logits.device))
        count = (targets != IGNORED).sum().to(nats.dtype)
        return torch.stack([nats, count, count * self.num_bytes / (len(self.ids) - 1)]), []

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        return {}


def ids_of(tokenizer: Any, document: Document) -> tuple[np.ndarray, int]:
    """The ids of a document, and the number of bytes of its first token: 0 for a special one."""
    if tokenizer is None:
        return np.frombuffer(document.data, np.uint8).astype(np.int64), 1
    try:
        text = document.data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.name} is not UTF-8 (byte {error.start:,}: {error.reason}), and this model's tokenizer takes nothing "
            "else; convert the text."
        ) from None
    numbers, offsets = encoded(tokenizer, text)
    ids = np.array(numbers, np.int64)
    if not len(ids):
        return ids, 0
    if offsets is not None:
        (start, end), (second, _) = [*offsets, (len(text), 0)][:2]
        shared = start < end and second == start  # a character of several tokens begins with a token of one byte
        return ids, 1 if shared else len(text[start:end].encode())
    return ids, 0 if ids[0] in tokenizer.all_special_ids else len(tokenizer.decode(ids[:1]).encode())


def encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Return the ids of a text and, where the tokenizer tells it, from which character to which each token is."""
    if isinstance(tokenizer, SavedTokenizer):
        encoding = tokenizer.backend_tokenizer.encode(text)
        return encoding.ids, encoding.offsets
    fields = tokenizer(text, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    return fields["input_ids"], fields["offset_mapping"] if tokenizer.is_fast else None


def context_length(most: int | None, requested: int | None, option: str = "--length") -> int:
    """Return the requested length, or the most that the model reads, up to LONGEST. UserError for more than it reads."""
    if requested is not None and most and requested > most:
        raise UserError(
            f"{option} {requested:,} is longer than this model's context; expected {most:,} tokens at most."
        )
    return requested if requested is not None else min(LONGEST, most or LONGEST)
