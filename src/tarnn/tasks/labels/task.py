"""Classification: one label for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.errors import UserError
from tarnn.tasks.base import Report, Trained, register
from tarnn.tasks.sequences import EncoderSettings, SequenceTask, facts_of, refuse_other_data, scored, split
from tarnn.tasks.settings import option
from tarnn.tasks.text.task import TokenSettings

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

    name, model_type, of = "classification", "tarnn", "labelled texts"
    architecture, next = "TarnnForSequenceClassification", "predict"
    settings_class = ClassificationSettings
    unit, counted, rates = "bits_per_label", "texts", ("accuracy",)

    def __init__(self, settings: ClassificationSettings, first: bool, saved: dict[str, Any] | None, report: Report):
        from tarnn.tasks.text.corpus import make_tokenizer

        self.settings: ClassificationSettings = settings
        val = None if settings.val is None else self.read_rows([settings.val])
        train, held_out = split(self.read_rows(settings.sources), val, settings, report)
        self.labels = sorted({label for row in train for label in self.labels_of(row)})
        if len(self.labels) < 2:
            raise UserError(
                f"all texts of {', '.join(settings.sources)} have the label {self.labels[0]!r}; a classifier needs two or more."
            )
        self.data_facts = {"classes": self.labels, "train": facts_of(train), "validation": facts_of(held_out)}
        refuse_other_data(self.data_facts, saved, self, settings)
        self.tokenizer = make_tokenizer(settings.tokenizer, (self.input_of(row).encode() for row in train))
        self.examples = self.tokenized(train, report)
        self.held_out = self.tokenized(held_out, report) if held_out else None
        self.epoch, self.example = len(self.examples), self.input_of(train[0])

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        return list(read_pairs(sources, self.settings.label_field, self.settings.text_field))

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.last

    def examples_of(self, rows: list[Pair], trained: Trained, report: Report) -> PaddedRows:
        from tarnn.data.saved_tokenizer import open_saved_tokenizer

        names = trained.config.id2label
        self.labels, self.tokenizer = [names[i] for i in sorted(names)], open_saved_tokenizer(trained.folder)
        return self.tokenized(rows, report)

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """With the label and the guess of each text."""
        logits, labels = model(**batch).logits, batch["labels"]
        return scored(logits, labels), list(zip(labels.tolist(), logits.argmax(-1).tolist()))

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """labels; confusion: by label, how many of its texts were given each label."""
        return confusion(self.labels, outcomes)

    def tokenized(self, rows: Sequence[Pair], report: Report) -> PaddedRows:
        """Ids and the number of the label; UserError for a label that the training data lack."""
        from tarnn.data.examples import PaddedRows
        from tarnn.data.tokenizers import encode

        limit, cut, found = self.settings.max_length, 0, []
        for row in rows:
            ids = encode(self.tokenizer, row.last.encode(), row.place)
            cut += limit is not None and len(ids) > limit
            found.append({"input_ids": ids[:limit], "labels": self.number_of(row.first, row)})
        if cut:
            report(f"cut to --max-length {limit:,} tokens: {cut:,} of {len(rows):,} texts")
        return PaddedRows(found, {"input_ids": self.tokenizer.pad_token_id})

    @staticmethod
    def labels_of(row: Pair) -> list[str]:
        return [row.first]

    def number_of(self, label: str, row: Pair) -> int:
        """UserError for a label that is none of the classes."""
        if label not in self.labels:
            raise UserError(
                f"{row.place}: the label {label!r} is none of the classes of the training data, which are "
                f"{', '.join(self.labels[:10])}{' …' if len(self.labels) > 10 else ''}."
            )
        return self.labels.index(label)

    @staticmethod
    def classes() -> tuple[Any, Any]:
        from tarnn.models import TarnnConfig, TarnnForSequenceClassification

        return TarnnConfig, TarnnForSequenceClassification

    @staticmethod
    def check(settings: ClassificationSettings) -> None:
        token_config(settings)

    def config(self) -> Any:
        longest = max(len(row["input_ids"]) for part in (self.examples, self.held_out) if part for row in part.rows)
        names = {"id2label": dict(enumerate(self.labels)), "label2id": {x: i for i, x in enumerate(self.labels)}}
        return token_config(self.settings, self.tokenizer, longest, **names)

    def rows(self) -> dict[str, str]:
        train, held_out = self.data_facts["train"], self.data_facts["validation"]
        shown = ", ".join(self.labels[:6]) + (" …" if len(self.labels) > 6 else "")
        return {
            "texts": f"{', '.join(self.settings.sources)}: {train['rows']:,} of {len(self.labels)} classes: {shown}",
            "validation": f"{held_out['rows']:,} texts, {self.settings.val or 'picked at random'}"
            if held_out["rows"]
            else "none: the latest model is kept, not the best",
        }

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


def token_config(settings: Any, tokenizer: Any = None, longest: int = 1, **of_data: Any) -> Any:
    """The config of an encoder of tokens, with what the data say. Without a tokenizer, all else is checked."""
    from tarnn.models import TarnnConfig
    from tarnn.tasks.model import chosen, make_config

    choices = chosen(settings) | {"causal": settings.causal}
    if choices.get("position") == "learned":
        choices.setdefault("max_position_embeddings", longest)
    if tokenizer is not None:
        end = tokenizer.eos_token_id
        choices |= {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return make_config(TarnnConfig, settings, choices | of_data)


def confusion(labels: Sequence[str], outcomes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """{"labels": …, "confusion": …}: a row for each true label, a column for each that was guessed."""
    table = [[0] * len(labels) for _ in labels]
    for true, guess in outcomes:
        table[true][guess] += 1
    return {"labels": list(labels), "confusion": table}
