"""Classification: one label for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.data.pairs import Pair, read_pairs
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Trained, register
from tarnn.tasks.sequences import EncoderSettings, TokenTask
from tarnn.tasks.settings import TokenSettings, option
from tarnn.tasks.sums import scored

if TYPE_CHECKING:
    import numpy as np
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
class ClassificationTask(TokenTask):
    """The classes are the labels of the training data, in alphabetical order; the measure is bits per label."""

    name, of = "classification", "labelled texts"
    architecture, next = "TarnnForSequenceClassification", "predict"
    settings_class = ClassificationSettings
    unit, counted, rates = "bits_per_label", "texts", ("accuracy",)

    padding: ClassVar[dict[str, float]] = {}  # of labels, where a text has several
    settings: ClassificationSettings
    numbers: dict[str, int]  # of the classes, by label

    def learn(self, train: Sequence[Pair]) -> dict[str, Any]:
        """The classes."""
        labels = sorted({label for row in train for label in self.labels_of(row)})
        if len(labels) < 2:
            raise UserError(
                f"all texts of {', '.join(self.settings.sources)} have the label {labels[0]!r}; a classifier needs two or more."
            )
        self.numbers = {label: i for i, label in enumerate(labels)}
        return {"classes": labels}

    def examples_of(self, rows: list[Pair], trained: Trained, log: Log) -> PaddedRows:
        names = trained.config.id2label
        self.numbers = {names[i]: i for i in sorted(names)}
        return super().examples_of(rows, trained, log)

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        return list(
            read_pairs(sources, self.settings.label_field, self.settings.text_field, "--label-field, --text-field")
        )

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.last

    @staticmethod
    def labels_of(row: Pair) -> list[str]:
        return [row.first]

    def number_of(self, label: str, row: Pair) -> int:
        """UserError for a label that is none of the classes."""
        if label not in self.numbers:
            raise UserError(
                f"{row.place}: the label {label!r} is none of the classes of the training data, which are {self.first_of(10)}."
            )
        return self.numbers[label]

    def first_of(self, count: int) -> str:
        """The names of the first classes."""
        return ", ".join([*self.numbers][:count]) + (" …" if len(self.numbers) > count else "")

    def tokenized(self, rows: Sequence[Pair], log: Log) -> PaddedRows:
        """Ids, and the number of each label; UserError for a label that the training data lack."""
        from tarnn.data.examples import PaddedRows

        limit, examples = self.settings.max_length, [self.example_of(row) for row in rows]
        if cut := sum(limit is not None and len(example["input_ids"]) > limit for example in examples):
            log(f"cut to --max-length {limit:,} tokens: {cut:,} of {len(rows):,} texts")
        examples = [{name: x[:limit] if x.ndim else x for name, x in example.items()} for example in examples]
        return PaddedRows(examples, {"input_ids": self.tokenizer.pad_token_id, **self.padding})

    def example_of(self, row: Pair) -> dict[str, np.ndarray]:
        """The text's ids, and the number of its label."""
        import numpy as np

        from tarnn.data.tokenizers import encode

        number = np.array(self.number_of(row.first, row))
        return {"input_ids": encode(self.tokenizer, row.last.encode(), row.place), "labels": number}

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """With the label and the guess wherever there is a label."""
        logits, labels = model(**batch).logits, batch["labels"]
        real = labels != -100
        return scored(logits, labels), list(zip(labels[real].tolist(), logits.argmax(-1)[real].tolist()))

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """labels; confusion: by label, how often each label was guessed."""
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
        """The most likely label as "output", and the `top` likeliest with their probabilities."""
        import torch

        for text in inputs:
            ids = torch.tensor([reader.backend_tokenizer.encode(text).ids], device=model.device)
            shares = model(ids).logits[0].float().softmax(-1)
            best = shares.topk(min(top, len(shares)))
            names = [model.config.id2label[i] for i in best.indices.tolist()]
            yield {"output": names[0], "probabilities": dict(zip(names, best.values.tolist()))}
