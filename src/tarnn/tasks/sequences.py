"""What tasks whose examples are whole sequences have in common: batches with padding, and the loss of the model itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tarnn.data.overlap import refuse_overlap
from tarnn.data.pairs import Pair, digest
from tarnn.errors import UserError
from tarnn.tasks.base import Report, Task, Trained, facts_of_held_out, refuse_other_held_out
from tarnn.tasks.settings import RunSettings, option

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.data.examples import Batches, EpochSampler, PaddedRows

VALIDATION_FRACTION, VALIDATION_ROWS = (0.1, 1000)  # held out where nothing was asked for: a part, and at most so many
X = TypeVar("X", bound=tuple[Any, ...])  # two texts, or more, and the place that they are from


@dataclass(frozen=True)
class EncoderSettings(RunSettings):
    """What runs of encoders have in common."""

    causal: bool = option(
        False,
        "Each token sees only those before it, so that a stream can be read (default: both sides).",
        "Sequences",
        flag="--causal",
    )


class SequenceTask(Task):
    """A row is an example and the unit of progress; its loss is what the model's forward gives it."""

    settings: RunSettings
    examples: PaddedRows
    held_out: PaddedRows | None

    def sampler(self, num_examples: int, seed: int) -> EpochSampler:
        from tarnn.data.examples import EpochSampler

        return EpochSampler(len(self.examples), num_examples, seed)

    @staticmethod
    def collate(rows: Any) -> dict[str, Tensor]:
        from tarnn.data.examples import collate

        return collate(rows)

    def validation(self, batch_size: int) -> Batches | None:
        from tarnn.data.examples import Batches

        return None if self.held_out is None else Batches(self.held_out, batch_size)

    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(**batch)
        return out.loss, {"logits": out.logits}

    def sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return scored(model(**batch).logits, batch["labels"])

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], report: Report) -> SequenceTask:
        settings = trained.settings
        task = cls.__new__(cls)
        task.settings = settings
        if sources:
            rows = task.read_rows(sources)
        else:
            facts_of_held_out(trained, cls)
            val = None if settings.val is None else task.read_rows([settings.val])
            rows = split(task.read_rows(settings.sources), val, settings)[1]
            refuse_other_held_out(trained, cls, facts_of(rows))
        task.evaluated = ", ".join(sources) or f"what {trained.folder} held out"
        task.evaluated += f": {len(rows):,} {cls.counted}"
        task.held_out = task.examples_of(rows, trained, report)
        task.example = task.input_of(rows[0])
        return task

    @staticmethod
    @abstractmethod
    def input_of(row: Pair) -> str:
        """What `predict` reads of a row."""

    @abstractmethod
    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        """The rows of files, as the settings say how they are read."""

    @abstractmethod
    def examples_of(self, rows: list[Pair], trained: Trained, report: Report) -> PaddedRows:
        """Rows as a trained model reads them."""

    def step_row(self, per_step: int) -> str:
        return f"{per_step:,} {self.counted}"


def scored(logits: Tensor, labels: Tensor) -> Tensor:
    """(nats, labels, labels, hits) over all labels that are not −100; float64 where the device has it."""
    import torch
    from torch.nn.functional import cross_entropy

    from tarnn.numerics import widest

    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    nats = cross_entropy(logits, labels, reduction="sum").to(widest(labels.device))
    count, hits = (x.sum().to(nats.dtype) for x in (labels != -100, logits.argmax(-1) == labels))
    return torch.stack([nats, count, count, hits])


def split(
    rows: Sequence[X], held_out: Sequence[X] | None, settings: RunSettings, report: Report = lambda line: None
) -> tuple[list[X], list[X]]:
    """Rows to train on, and those held out: of --val, or picked at random by --seed.

    UserError where all rows of --val are among those to train on; `report` says it of some.
    """
    import numpy as np

    if held_out is not None:
        texts, others = ([row[:2] for row in part] for part in (rows, held_out))
        refuse_overlap(texts, others, "rows", report)
        return list(rows), list(held_out)
    fraction = VALIDATION_FRACTION if settings.val_fraction is None else settings.val_fraction
    if not 0 <= fraction < 1:
        raise UserError(
            f"a validation fraction of {fraction} is not a part of the examples; expected 0 ≤ fraction < 1."
        )
    count = round(fraction * len(rows))
    count = min(count, VALIDATION_ROWS) if settings.val_fraction is None else count
    order = np.random.default_rng(settings.seed).permutation(len(rows))
    chosen = set(order[:count].tolist())
    return [x for i, x in enumerate(rows) if i not in chosen], [x for i, x in enumerate(rows) if i in chosen]


def refuse_other_data(facts: dict[str, Any], saved: dict[str, Any] | None, task: Task, settings: RunSettings) -> None:
    """UserError where a run is resumed and its data are not what they were."""
    before = (saved or {}).get(task.of)
    if before is not None and before != facts:
        raise UserError(
            f"the data of {', '.join(settings.sources)} are no longer those that the run in {settings.out} began with; "
            "restore them to --resume, or start again with --overwrite."
        )


def facts_of(rows: Sequence[Pair]) -> dict[str, Any]:
    return {"rows": len(rows), "digest": digest(rows)}
