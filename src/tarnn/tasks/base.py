"""The parts of a task: its settings, data, model, loss, measure and sample.

    @register
    class MyTask(Task): ...

is all that `tarnn train --task NAME` needs, with the options that its settings declare. Length, time, log, checkpoints
and resuming are the same for all tasks, and belong to `tarnn.training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.settings import RunSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Sampler
    from transformers import PreTrainedModel, TrainingArguments


@dataclass(frozen=True)
class Sample:
    """Sample of a trained model, made at the end of its run."""

    file: Path
    text: str = ""  # to be shown
    about: str = ""  # the file, in words


@dataclass(frozen=True)
class Trained:
    """A trained model's folder, and what is known of its run."""

    folder: Path
    config: Any  # of the model
    settings: Any  # of the run; the task's defaults where `saved` is None
    saved: dict[str, Any] | None  # settings.json; None for a model that was saved without a run

    def held_out(self, of: str) -> Any:
        """Return the facts of settings.json about the held-out data, which it calls `of`; UserError for none."""
        if self.saved is None:
            raise UserError(f"{self.folder} holds no settings.json, which says what a run held out. {self.name_data}")
        facts = (self.saved.get(of) or {}).get("validation")
        if not facts or 0 in (facts.get("tokens"), facts.get("rows")):
            raise UserError(f"the run in {self.folder} held nothing out. {self.name_data}")
        return facts

    def refuse_other(self, of: str, now: Any) -> None:
        """UserError where the sources now hold out other data than those of the run; `now` are their facts."""
        if self.held_out(of) != now:
            raise UserError(
                f"{', '.join(self.settings.sources)} no longer hold what the run in {self.folder} held out. "
                f"{self.name_data}"
            )

    @property
    def name_data(self) -> str:
        return f"Name the data: `tarnn eval {self.folder} DATA`."


class Trainable(ABC):
    """Data and their loss, as the trainer takes them."""

    unit: ClassVar[str] = "bits_per_byte"  # of the measure, as the log calls it
    counted: ClassVar[str] = "tokens"  # what progress counts
    rates: ClassVar[tuple[str, ...]] = ()  # what `outcome` counts besides, each a part of the tokens: accuracy
    keeps_model: ClassVar[bool] = True  # whether the run leaves the best model in its folder
    # in a batch, what its mean loss is over: numbers, IGNORED where there is none; None: examples, which all weigh the same
    targets: ClassVar[str | None] = None

    epoch: int  # what the data count
    per_example: int = 1  # what one example counts
    bytes_per_token: float | None = 1.0  # None: the measure is the loss itself
    examples: Any  # a Dataset
    held_out: Any = None  # examples to validate on
    tokenizer: Any = None
    example: str = ""  # an input of the data, for a task whose `next` is predict

    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        """Return the order of the examples over the whole run, epoch after epoch without a gap."""
        from tarnn.data.examples import EpochSampler

        return EpochSampler(len(self.examples), num_examples, seed)

    @staticmethod
    def collate(rows: Any) -> dict[str, Tensor]:
        """Examples as a batch."""
        from tarnn.data.examples import collate

        return collate(rows)

    def loss(self, model: Any, batch: dict[str, Tensor], count: Tensor | None = None) -> Tensor:
        """Mean loss in nats, in float32; with `count`, the sum over all `targets`, divided by it."""
        return model(**batch, **({} if count is None else {"num_items_in_batch": count}))["loss"]

    def within_step(self, batch: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """Return what forward and backward of a batch run in."""
        return nullcontext()

    def validation(self, batch_size: int) -> Sequence[dict[str, Tensor]] | None:
        """The held-out data in batches, in a fixed order; None where nothing is held out."""
        from tarnn.data.examples import Batches

        return None if self.held_out is None else Batches(self.held_out, batch_size)

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """Measure a validation batch: return its sums, and what `details` needs of each of its examples.

        Sums are (nats, tokens, bytes), float64 where the device has it, and after them what `rates` names.
        """
        raise NotImplementedError

    def sample(self, max_seconds: float | None) -> Sample | None:
        """Let the trained model in the run's folder make something, within that time if it can."""
        return None

    @property
    def has_sample(self) -> bool:
        """Whether a run with a budget of time is to keep some for `sample`."""
        return False

    def trainer_options(self, args: TrainingArguments) -> dict[str, Any]:
        """Arguments of Hugging Face's Trainer that are the task's own, such as its optimizer."""
        return {}


class Task(Trainable):
    """One kind of training. Its file is light to import: torch and the models are imported by the methods.

    An object of the class is the task with its data: `settings` are checked, `first` says whether this is the first
    process (others find what it has written), `saved` is settings.json of the run that is resumed, and `log` takes
    lines about the progress.
    """

    name: ClassVar[str]  # as in --task
    model_type: ClassVar[str] = "tarnn"  # as in config.json
    architecture: ClassVar[str]  # the name of the model's class, as there
    config_class: ClassVar[str] = "TarnnConfig"
    of: ClassVar[str]  # "a model of …"
    settings_class: ClassVar[type[RunSettings]]
    next: ClassVar[str] = "generate"  # the command that uses the model
    reads_text: ClassVar[bool] = True  # whether the inputs of `predict` are texts, or else files

    settings: Any  # of `settings_class`
    data_facts: dict[str, Any]  # about the data, for settings.json
    evaluated: str = ""  # what `to_evaluate` has found to measure on, in words

    @abstractmethod
    def __init__(self, settings: Any, first: bool, saved: dict[str, Any] | None, log: Log): ...

    @classmethod
    def classes(cls) -> tuple[Any, Any]:
        """The classes of its config and of its model."""
        import tarnn.models as models

        return getattr(models, cls.config_class), getattr(models, cls.architecture)

    @classmethod
    def config_type(cls) -> Any:
        """Return the class of its config, and import no model where that can be."""
        return cls.classes()[0]

    @classmethod
    def recurrent(cls) -> tuple[Any, Any] | None:
        """Return the record and the class of a model that only runs, token after token, without transformers.

        None for a model that reads whole sequences.
        """
        return None

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise UserError for a model that can't be made, before any data are read."""
        cls.make_config(settings)

    def config(self) -> Any:
        """The config of the model that the settings ask for, with what the data say."""
        return self.make_config(self.settings, self.tokenizer)

    @classmethod
    def make_config(cls, settings: Any, tokenizer: Any = None, longest: int | None = None, **of_data: Any) -> Any:
        """Make the config of the settings, with the tokenizer's vocabulary and what else the data say."""
        from tarnn.tasks.model import chosen, make_config, vocabulary

        of_data |= {} if tokenizer is None else vocabulary(tokenizer)
        return make_config(cls.classes()[0], settings, chosen(settings), of_data, longest)

    def model(self) -> PreTrainedModel:
        return self.classes()[1](self.config())

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], log: Log) -> Task:
        """The task with data to measure a trained model on, and nothing to train: `sources`, or, where there are none, what
        its run held out.

        UserError where the run held nothing out, or its data are no longer those that it began with.
        """
        raise UserError(f"tarnn eval does not measure the task {cls.name}.")

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """More about all examples than sums can say: a confusion table, errors per word, a standard error."""
        return {}

    @abstractmethod
    def rows(self) -> dict[str, str]:
        """Describe the data, in lines for the table of settings."""

    def step_row(self, per_step: int) -> str:
        """Describe a step, for the same table."""
        return f"{per_step:,} {self.counted}"

    def run_facts(self) -> dict[str, Any]:
        """More for settings.json."""
        return {}

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """Yield what a trained model says of each input: its "output", and more for JSON. For tasks whose `next` is predict.

        reader: the tokenizer, or, where inputs are files of sound, the front end that makes frames of them.
        """
        raise NotImplementedError

    def refuse_other_data(self, saved: dict[str, Any] | None) -> None:
        """UserError where a run is resumed and its data are not what they were."""
        before = (saved or {}).get(self.of)
        if before is not None and before != self.data_facts:
            raise UserError(
                f"the data of {', '.join(self.settings.sources)} are no longer those that the run in {self.settings.out} "
                "began with; restore them to --resume, or start again with --overwrite."
            )


TASKS: dict[str, type[Task]] = {}


def register(task: type[Task]) -> type[Task]:
    """Register a task by its name, and tell its settings whose they are."""
    TASKS[task.name] = task
    task.settings_class.task = task.name
    return task


def task_of(config: Mapping[str, Any]) -> type[Task] | None:
    """The task of a model with that config.json: by its architecture, or, without a known one, by its model_type."""
    names, kind = config.get("architectures"), config.get("model_type")
    alike = [task for task in TASKS.values() if task.model_type == kind]
    named = [task for task in alike if isinstance(names, list) and task.architecture in names]
    return next(iter(named or alike), None)


def own_options(task: str) -> dict[str, Field]:
    """The options that not every task has."""
    shared = {f.name for f in fields(RunSettings)}
    return {f.name: f for f in fields(TASKS[task].settings_class) if f.name not in shared}


def sums(nats: Tensor, *counts: Tensor | float) -> Tensor:
    """Stack (nats, *counts) in one tensor, float64 where the device has it."""
    import torch

    from tarnn.numerics import widest

    nats = nats.to(widest(nats.device))
    return torch.stack([nats, *(torch.as_tensor(x).to(nats) for x in counts)])


def scored(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum (nats, labels, labels, hits) over all labels that are not −100."""
    from torch.nn.functional import cross_entropy

    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    nats, count = cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
    return sums(nats, count, count, (logits.argmax(-1) == labels).sum())
