"""The base of tasks whose examples are whole sequences: rows of files, split, and batches with padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, digest, refuse_overlap
from tarnn.log import Log, silent
from tarnn.tasks.base import Task, Trained, scored
from tarnn.tasks.settings import NOTHING_HELD_OUT, RunSettings, held_out_count, option

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.data.examples import PaddedRows

VALIDATION_ROWS = 1000  # held out at most, by default


@dataclass(frozen=True)
class EncoderSettings(RunSettings):
    """Options of all runs of encoders."""

    causal: bool = option(
        False,
        "Each token sees only those before it, so that a stream can be read (default: both sides).",
        "Sequences",
        flag="--causal",
        key="causal",
    )


class SequenceTask(Task):
    """A row is an example and the unit of progress; its loss is what the model's forward gives it."""

    examples: PaddedRows
    held_out: PaddedRows | None

    def __init__(self, settings: Any, first: bool, saved: dict[str, Any] | None, log: Log):
        self.settings = settings
        train, held_out = self.split(log)
        self.data_facts = self.learn(train) | {"train": facts_of(train), "validation": facts_of(held_out)}
        self.refuse_other_data(saved)
        self.examples, self.held_out = self.prepare(train, held_out, log)
        self.epoch, self.example = len(self.examples), self.input_of(train[0])

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], log: Log) -> SequenceTask:
        task = cls.__new__(cls)
        task.settings = trained.settings
        if sources:
            rows = task.read_rows(sources)
        else:
            trained.held_out(cls.of)
            rows = task.split()[1]
            trained.refuse_other(cls.of, facts_of(rows))
        task.evaluated = ", ".join(sources) or f"what {trained.folder} held out"
        task.evaluated += f": {len(rows):,} {cls.counted}"
        task.held_out = task.examples_of(rows, trained, log)
        task.example = task.input_of(rows[0])
        return task

    def split(self, log: Log = silent) -> tuple[list[Pair], list[Pair]]:
        """Split the rows: those to train on, and those held out, of --val or picked at random by --seed.

        UserError where all rows of --val are among those to train on; a line in the log where some are.
        """
        import numpy as np

        settings, rows = self.settings, self.read_rows(self.settings.sources)
        if settings.val is not None:
            held_out = self.read_rows([settings.val])
            refuse_overlap([row[:2] for row in rows], [row[:2] for row in held_out], "rows", log)
            return rows, held_out
        count = held_out_count(len(rows), settings.val_fraction, VALIDATION_ROWS)
        order = np.random.default_rng(settings.seed).permutation(len(rows))
        chosen = set(order[:count].tolist())
        return [x for i, x in enumerate(rows) if i not in chosen], [x for i, x in enumerate(rows) if i in chosen]

    @abstractmethod
    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        """Read the rows of files, as the settings say."""

    @staticmethod
    @abstractmethod
    def input_of(row: Pair) -> str:
        """Return the part of a row that `predict` reads."""

    def learn(self, train: Sequence[Pair]) -> dict[str, Any]:
        """Learn what the training rows decide, such as the classes; return facts for settings.json."""
        return {}

    @abstractmethod
    def prepare(self, train: list[Pair], held_out: list[Pair], log: Log) -> tuple[PaddedRows, PaddedRows | None]:
        """Make the examples of both parts, with a tokenizer or front end that the first part decides."""

    @abstractmethod
    def examples_of(self, rows: list[Pair], trained: Trained, log: Log) -> PaddedRows:
        """Make examples for a trained model."""

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        return scored(model(**batch).logits, batch["labels"]), []

    def rows(self) -> dict[str, str]:
        held_out = self.data_facts["validation"]["rows"]
        some = f"{held_out:,} {self.counted}, {self.settings.val or 'picked at random'}"
        return {
            self.counted: f"{', '.join(self.settings.sources)}: {self.data_facts['train']['rows']:,}{self.row_end}",
            "validation": some if held_out else NOTHING_HELD_OUT,
        }

    @property
    def row_end(self) -> str:
        """The end of the first of these rows: more about the data."""
        return ""


def facts_of(rows: Sequence[Pair]) -> dict[str, Any]:
    return {"rows": len(rows), "digest": digest(rows)}
