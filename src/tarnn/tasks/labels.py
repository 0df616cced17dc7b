"""Classification: one label for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Trained, register, scored
from tarnn.tasks.sequences import EncoderSettings, SequenceTask
from tarnn.tasks.settings import TokenSettings, option

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.data.examples import PaddedRows


@dataclass(frozen=True)
class ClassificationSettings(EncoderSettings, TokenSettings):
    """A run of `tarnn train --task classification`."""

    label_field: str = option("label", "The field that holds the label in jsonl and datasets.", "Sequences")
    max_length: int | None = option(
        None, "Cut longer sequences to so many tokens, which is logged (default: none is cut).", "Sequences", least=1
    )


@register
class ClassificationTask(SequenceTask):
    """The classes are the labels of the training data, in alphabetical order; the measure is bits per label."""

    name, of = "classification", "labelled texts"
    architecture, next = "TarnnForSequenceClassification", "predict"
    settings_class = ClassificationSettings
    unit, counted, rates = "bits_per_label", "texts", ("accuracy",)

    settings: ClassificationSettings
    numbers: dict[str, int]  # of the classes, by label

    def learn(self, train: Sequence[Pair]) -> dict[str, Any]:
        """Learn the classes."""
        labels = sorted({row.first for row in train})
        if len(labels) < 2:
            raise UserError(
                f"all texts of {', '.join(self.settings.sources)} have the label {labels[0]!r}; a classifier needs two or more."
            )
        self.numbers = {label: i for i, label in enumerate(labels)}
        return {"classes": labels}

    def prepare(self, train: list[Pair], held_out: list[Pair], log: Log) -> tuple[PaddedRows, PaddedRows | None]:
        from tarnn.data.tokenizers import make_tokenizer

        self.tokenizer = make_tokenizer(self.settings.tokenizer, (row.last.encode() for row in train))
        return self.tokenized(train, log), self.tokenized(held_out, log) if held_out else None

    def examples_of(self, rows: list[Pair], trained: Trained, log: Log) -> PaddedRows:
        from tarnn.data.saved_tokenizer import open_saved_tokenizer

        names = trained.config.id2label
        self.numbers = {names[i]: i for i in sorted(names)}
        self.tokenizer = open_saved_tokenizer(trained.folder)
        return self.tokenized(rows, log)

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        names = self.settings.label_field, self.settings.text_field
        return list(read_pairs(sources, *names, ("--label-field", "--text-field")))

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.last

    def number_of(self, label: str, row: Pair) -> int:
        """Return the number of a class; UserError for a label that is none."""
        if label not in self.numbers:
            raise UserError(
                f"{row.place}: the label {label!r} is none of the classes of the training data, which are {self.first_of(10)}."
            )
        return self.numbers[label]

    def first_of(self, count: int) -> str:
        """Return the names of the first classes."""
        return ", ".join([*self.numbers][:count]) + (" …" if len(self.numbers) > count else "")

    def tokenized(self, rows: Sequence[Pair], log: Log) -> PaddedRows:
        """Make examples of ids and the number of the label; UserError for a label that the training data lack."""
        import numpy as np

        from tarnn.data.examples import PaddedRows
        from tarnn.data.tokenizers import encode

        limit = self.settings.max_length
        texts = [encode(self.tokenizer, row.last.encode(), row.place) for row in rows]
        if cut := sum(limit is not None and len(ids) > limit for ids in texts):
            log(f"cut to --max-length {limit:,} tokens: {cut:,} of {len(rows):,} texts")
        numbers = [np.array(self.number_of(row.first, row)) for row in rows]
        examples = [{"input_ids": ids[:limit], "labels": number} for ids, number in zip(texts, numbers)]
        return PaddedRows(examples, {"input_ids": self.tokenizer.pad_token_id})

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the sums, and each text's label and guess."""
        logits, labels = model(**batch).logits, batch["labels"]
        return scored(logits, labels), list(zip(labels.tolist(), logits.argmax(-1).tolist()))

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """Return the labels, and by label how often each label was guessed."""
        table = [[0] * len(self.numbers) for _ in self.numbers]
        for true, guess in outcomes:
            table[true][guess] += 1
        return {"labels": [*self.numbers], "confusion": table}

    @classmethod
    def check(cls, settings: ClassificationSettings) -> None:
        cls.make_config(settings, longest=1)

    def config(self) -> Any:
        longest = max(len(row["input_ids"]) for part in (self.examples, self.held_out) if part for row in part.rows)
        names = {"id2label": {i: label for label, i in self.numbers.items()}, "label2id": self.numbers}
        return self.make_config(self.settings, self.tokenizer, longest, **names)

    @property
    def row_end(self) -> str:
        return f" of {len(self.numbers)} classes: {self.first_of(6)}"

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """Yield the most likely label as "output", and the `top` likeliest with their probabilities."""
        import torch

        for text in inputs:
            ids = torch.tensor([reader.backend_tokenizer.encode(text).ids], device=model.device)
            shares = model(ids).logits[0].float().softmax(-1)
            best = shares.topk(min(top, len(shares)))
            names = [model.config.id2label[i] for i in best.indices.tolist()]
            yield {"output": names[0], "probabilities": dict(zip(names, best.values.tolist()))}
