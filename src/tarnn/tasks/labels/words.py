"""Token classification: a label for each word of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.data.pairs import Pair, rows_of
from tarnn.data.tables import Row
from tarnn.errors import UserError
from tarnn.tasks.base import register
from tarnn.tasks.labels.task import ClassificationSettings, ClassificationTask
from tarnn.tasks.settings import option

if TYPE_CHECKING:
    import numpy as np

SOURCES = (
    'a .jsonl file of lines such as {"tokens": ["Ada", "wrote"], "labels": ["NAME", "VERB"]}, or '
    "'datasets:NAME[:CONFIG[:SPLIT]]'"
)


@dataclass(frozen=True)
class TokenClassificationSettings(ClassificationSettings):
    """A run of `tarnn train --task token-classification`. Sources are .jsonl files, or rows of `datasets`."""

    tokens_field: str = option("tokens", "The field that holds the list of words.", "Sequences")
    labels_field: str = option("labels", "The field that holds as many labels.", "Sequences")


@register
class TokenClassificationTask(ClassificationTask):
    """A word's label is that of its last token, which has seen all of the word in a causal model too; the measure is bits per
    label."""

    name, of = "token-classification", "texts with labelled words"
    architecture = "TarnnForTokenClassification"
    settings_class, text_setting = TokenClassificationSettings, "tokens_field"
    targets = "labels"
    padding: ClassVar[dict[str, float]] = {"labels": -100}
    settings: TokenClassificationSettings

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        """Pairs of labels and words, each as a JSON list."""
        names = (self.settings.labels_field, self.settings.tokens_field)
        return [pair_of(row, *names, place) for source in sources for place, row in rows_of(source, SOURCES)]

    @staticmethod
    def labels_of(row: Pair) -> list[str]:
        return json.loads(row.first)

    @staticmethod
    def input_of(row: Pair) -> str:
        return " ".join(json.loads(row.last))

    def example_of(self, row: Pair) -> dict[str, np.ndarray]:
        """The text's ids, and at the last of each word the number of its label."""
        import numpy as np

        numbers = [self.number_of(label, row) for label in self.labels_of(row)]
        ids, ends = ids_of_words(self.tokenizer, json.loads(row.last), row.place)
        labels = np.full(len(ids), -100)
        labels[ends] = numbers
        return {"input_ids": ids, "labels": labels}

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        return {"words": len(outcomes), **super().details(outcomes)}

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """Each word with its likeliest label as "output", and "words" with the label and its probability."""
        import torch

        for text in inputs:
            words = text.split()
            ids, ends = ids_of_words(reader, words, "the text")
            shares = model(torch.from_numpy(ids)[None].to(model.device)).logits[0, ends].float().softmax(-1)
            best = shares.max(-1)
            names = [model.config.id2label[i] for i in best.indices.tolist()]
            yield {
                "output": " ".join(f"{word}/{name}" for word, name in zip(words, names)),
                "words": [
                    {"word": word, "label": name, "probability": share}
                    for word, name, share in zip(words, names, best.values.tolist())
                ],
            }


def ids_of_words(tokenizer: Any, words: Sequence[str], place: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of words with spaces between them, and where the last one of each word stands."""
    import numpy as np

    backend = tokenizer.backend_tokenizer
    parts = [np.array(backend.encode(" " * (i > 0) + word).ids, np.int64) for i, word in enumerate(words)]
    if empty := [word for word, part in zip(words, parts) if not len(part)]:
        raise UserError(f"{place}: the word {empty[0]!r} has no tokens; leave it out.")
    return np.concatenate(parts), np.cumsum([len(part) for part in parts]) - 1


def pair_of(row: Row, labels: str, tokens: str, place: str) -> Pair:
    """The labels and the words of a row; UserError where they are not two lists of one length, or a word is empty."""
    names, words = list_of(row, labels, place), list_of(row, tokens, place)
    if len(names) != len(words) or not words:
        raise UserError(f"{place} has {len(words)} tokens and {len(names)} labels; expected one label for each.")
    for word in words:
        if not isinstance(word, str) or not word.strip() or word != "".join(word.split()):
            raise UserError(f"{place} has the token {word!r}; expected a word without spaces.")
    return Pair(json.dumps([str(x) for x in names]), json.dumps(words), place)


def list_of(row: Row, name: str, place: str) -> list[object]:
    """The list in a field; UserError where there is none."""
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, list):
        got = f"a {type(value).__name__}" if name in row else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise UserError(
            f"{place} has {got} where a list was expected, in the field {name!r}; name the right one with --tokens-field, "
            "--labels-field."
        )
    return value
