"""Sequence to sequence: from one text to another, by an encoder–decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.log import Log
from tarnn.tasks.base import register
from tarnn.tasks.sequences import TokenTask
from tarnn.tasks.settings import PATTERN, TokenSettings, option

if TYPE_CHECKING:
    from tarnn.data.examples import PaddedRows

LONGEST = 1024  # tokens that `predict` makes of one input


@dataclass(frozen=True)
class Seq2SeqSettings(TokenSettings):
    """A run of `tarnn train --task seq2seq`."""

    target_field: str = option("target", "The field that holds the target in jsonl and datasets.", "Sequences")
    encoder_layers: int | None = option(
        None, "Blocks of the encoder (default: as --layers).", "Sequences", least=1, key="encoder_layers"
    )
    cross_attention: str | None = option(
        None,
        f"Of the decoder to the encoder: {PATTERN.replace('linear).', '--attention).')}",
        "Sequences",
        key="cross_attention",
    )


@register
class Seq2SeqTask(TokenTask):
    """A pair is the unit of progress, a token of the target that of the measure; accuracy is that of the next token, given
    those before it."""

    name, model_type, of = "seq2seq", "tarnn_seq2seq", "pairs"
    architecture, config_class, next = "TarnnForConditionalGeneration", "TarnnSeq2SeqConfig", "predict"
    settings_class, text_column = Seq2SeqSettings, 0
    targets = "labels"
    unit, counted, rates = "bits_per_token", "pairs", ("accuracy",)
    settings: Seq2SeqSettings

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        return list(
            read_pairs(sources, self.settings.text_field, self.settings.target_field, "--text-field, --target-field")
        )

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.first

    def texts_of(self, row: Pair) -> Sequence[str]:
        return row[:2]

    def tokenized(self, rows: Sequence[Pair], log: Log) -> PaddedRows:
        """Ids of the source, and of the target with the token that ends it."""
        import numpy as np

        from tarnn.data.examples import PaddedRows
        from tarnn.data.tokenizers import encode

        end = self.tokenizer.eos_token_id
        examples = [
            {
                "input_ids": encode(self.tokenizer, row.first.encode(), row.place),
                "labels": np.append(encode(self.tokenizer, row.last.encode(), row.place), end),
            }
            for row in rows
        ]
        return PaddedRows(examples, {"input_ids": end, "labels": -100})

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """The likeliest target, token after token from a state of constant size, as "output"."""
        import torch

        for text in inputs:
            ids = torch.tensor([reader.backend_tokenizer.encode(text).ids], device=model.device)
            state, token = model.read(ids, capacity=LONGEST), model.start(1)
            made: list[int] = []
            while len(made) < LONGEST:
                logits, state = model.step(token, state, inplace=True)
                token = logits.argmax(-1)
                if (one := int(token)) == reader.eos_token_id:
                    break
                made.append(one)
            yield {"output": reader.decode(made), "ended": len(made) < LONGEST}
