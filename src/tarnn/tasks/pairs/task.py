"""Sequence to sequence: from one text to another, by an encoder–decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.tasks.base import Report, Trained, register
from tarnn.tasks.sequences import SequenceTask, facts_of, refuse_other_data, split
from tarnn.tasks.settings import PATTERN, option
from tarnn.tasks.text.task import TokenSettings

if TYPE_CHECKING:
    from tarnn.data.examples import PaddedRows

LONGEST = 1024  # tokens that `predict` makes of one input


@dataclass(frozen=True)
class Seq2SeqSettings(TokenSettings):
    """A run of `tarnn train --task seq2seq`."""

    target_field: str = option("target", "The field that holds the target in jsonl and datasets.", "Sequences")
    encoder_layers: int | None = option(None, "Blocks of the encoder (default: as --layers).", "Sequences", least=1)
    cross_attention: str | None = option(
        None, f"Of the decoder to the encoder: {PATTERN.replace('linear).', '--attention).')}", "Sequences"
    )


@register
class Seq2SeqTask(SequenceTask):
    """A pair is the unit of progress, a token of the target that of the measure; accuracy is that of the next token, given
    those before it."""

    name, model_type, of = "seq2seq", "tarnn_seq2seq", "pairs"
    architecture, next = "TarnnForConditionalGeneration", "predict"
    settings_class, text_column = Seq2SeqSettings, 0
    unit, counted, rates = "bits_per_token", "pairs", ("accuracy",)

    def __init__(self, settings: Seq2SeqSettings, first: bool, saved: dict[str, Any] | None, report: Report):
        from tarnn.tasks.text.corpus import make_tokenizer

        self.settings: Seq2SeqSettings = settings
        val = None if settings.val is None else self.read_rows([settings.val])
        train, held_out = split(self.read_rows(settings.sources), val, settings, report)
        self.data_facts = {"train": facts_of(train), "validation": facts_of(held_out)}
        refuse_other_data(self.data_facts, saved, self, settings)
        texts = (text.encode() for row in train for text in row[:2])
        self.tokenizer = make_tokenizer(settings.tokenizer, texts)
        self.examples = self.tokenized(train)
        self.held_out = self.tokenized(held_out) if held_out else None
        self.epoch, self.example = len(self.examples), self.input_of(train[0])

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        return list(read_pairs(sources, self.settings.text_field, self.settings.target_field))

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.first

    def examples_of(self, rows: list[Pair], trained: Trained, report: Report) -> PaddedRows:
        from tarnn.data.saved_tokenizer import open_saved_tokenizer

        self.tokenizer = open_saved_tokenizer(trained.folder)
        return self.tokenized(rows)

    def tokenized(self, rows: Sequence[Pair]) -> PaddedRows:
        """Ids of the source, and of the target with the token that ends it."""
        import numpy as np

        from tarnn.data.examples import PaddedRows
        from tarnn.data.tokenizers import encode

        end = self.tokenizer.eos_token_id
        found = [
            {
                "input_ids": encode(self.tokenizer, row.first.encode(), row.place),
                "labels": np.append(encode(self.tokenizer, row.last.encode(), row.place), end),
            }
            for row in rows
        ]
        return PaddedRows(found, {"input_ids": end, "labels": -100})

    @staticmethod
    def classes() -> tuple[Any, Any]:
        from tarnn.models import TarnnForConditionalGeneration, TarnnSeq2SeqConfig

        return TarnnSeq2SeqConfig, TarnnForConditionalGeneration

    @staticmethod
    def check(settings: Seq2SeqSettings) -> None:
        seq2seq_config(settings)

    def config(self) -> Any:
        return seq2seq_config(self.settings, self.tokenizer)

    def rows(self) -> dict[str, str]:
        train, held_out = self.data_facts["train"], self.data_facts["validation"]
        return {
            "pairs": f"{', '.join(self.settings.sources)}: {train['rows']:,}",
            "validation": f"{held_out['rows']:,} pairs, {self.settings.val or 'picked at random'}"
            if held_out["rows"]
            else "none: the latest model is kept, not the best",
        }

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


def seq2seq_config(settings: Seq2SeqSettings, tokenizer: Any = None) -> Any:
    """The config that the settings ask for, with the tokenizer's vocabulary. Without one, all else is checked."""
    from tarnn.tasks.model import chosen, make_config

    choices = chosen(settings)
    for name in ("encoder_layers", "cross_attention"):
        if (value := getattr(settings, name)) is not None:
            choices[name] = value.split(",") if isinstance(value, str) and "," in value else value
    if tokenizer is not None:
        end = tokenizer.eos_token_id
        choices |= {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return make_config(Seq2SeqTask.classes()[0], settings, choices)
