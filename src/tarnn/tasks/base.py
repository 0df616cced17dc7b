"""What a task is made of: its settings, data, model, loss, measure and sample. One folder per task.

    @register
    class MyTask(Task): ...

is all that `tarnn train --task NAME` needs, with the options that its settings declare. Length, time, log, checkpoints
and resuming are the same for all tasks, and belong to `tarnn.training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.errors import UserError
from tarnn.tasks.settings import RunSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset, Sampler
    from transformers import PreTrainedModel, TrainingArguments

Report = Callable[[str], None]  # takes a line about what happens


@dataclass(frozen=True)
class Facts:
    """What the log and the progress bar count, and in which unit."""

    unit: str  # of the measure, as the log calls it: bits_per_byte
    counted: str  # what progress counts: tokens, images
    per_step: int  # how many of them one optimizer step takes
    epoch: int  # how many the data have
    bytes_per_token: float | None  # None: the measure is the loss itself
    rates: tuple[str, ...] = ()  # what else a validation measures


@dataclass(frozen=True)
class Trained:
    """A trained model's folder, and what is known of its run."""

    folder: Path
    config: Any  # of the model
    settings: Any  # of the run; the task's defaults where `saved` is None
    saved: dict[str, Any] | None  # settings.json; None for a model that was saved without a run


class Trainable(ABC):
    """Data and their loss, as the trainer takes them; nothing is held out unless `validation` says so."""

    unit: ClassVar[str] = "bits_per_byte"
    counted: ClassVar[str] = "tokens"
    rates: ClassVar[tuple[str, ...]] = ()  # what `sums` counts besides, each a part of the tokens: accuracy
    keeps_model: ClassVar[bool] = True  # whether the run leaves the best model in its folder

    epoch: int
    per_example: int = 1  # what one example counts
    bytes_per_token: float | None = 1.0
    examples: Dataset
    tokenizer: Any = None
    example: str = ""  # an input of the data, for a task whose `next` is predict

    @abstractmethod
    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        """The examples of the whole run, in order: epoch after epoch without a seam."""

    @staticmethod
    @abstractmethod
    def collate(rows: Any) -> dict[str, Tensor]:
        """Examples as a batch."""

    @abstractmethod
    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss in nats, in float32, and the model's outputs."""

    def validation(self, batch_size: int) -> Sequence[dict[str, Tensor]] | None:
        """The held-out data in batches, in a fixed order; None where nothing is held out."""
        return None

    def sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """(nats, tokens, bytes) of a validation batch, float64 where the device has it, and after them what `rates` names."""
        raise NotImplementedError

    def sample(self, max_seconds: float | None) -> str:
        """What the trained model makes, within that time; printed at the end of the run."""
        return ""

    @property
    def has_sample(self) -> bool:
        """Whether `sample` makes something, and takes its time."""
        return False

    def trainer_options(self, args: TrainingArguments) -> dict[str, Any]:
        """Arguments of Hugging Face's Trainer that are the task's own, such as its optimizer."""
        return {}


class Task(Trainable):
    """One kind of training. Its file is light to import: torch and the models are imported by the methods.

    An object of the class is the task with its data: `settings` are checked, `first` says whether this is the first
    process (others find what it has written), `saved` is settings.json of the run that is resumed, and `report` takes
    lines about the progress.
    """

    name: ClassVar[str]  # as in --task
    model_type: ClassVar[str]  # as in config.json
    architecture: ClassVar[str]  # the name of the model's class, as there
    of: ClassVar[str]  # "a model of …"
    settings_class: ClassVar[type[RunSettings]]
    next: ClassVar[str] = "generate"  # the command that uses the model
    reads_text: ClassVar[bool] = True  # whether the inputs of `predict` are texts, or else files
    text_column: ClassVar[int] = -1  # of a .tsv file, that `predict` reads
    text_setting: ClassVar[str] = "text_field"  # names the field of other rows, that it reads

    data_facts: dict[str, Any]  # about the data, for settings.json
    evaluated: str = ""  # what `to_evaluate` has found to measure on, in words

    @abstractmethod
    def __init__(self, settings: Any, first: bool, saved: dict[str, Any] | None, report: Report): ...

    @staticmethod
    @abstractmethod
    def classes() -> tuple[Any, Any]:
        """The classes of its config and of its model."""

    @classmethod
    def recurrent(cls) -> tuple[Any, Any]:
        """The same for a model that only runs, token after token; without transformers, where it can be."""
        return cls.classes()

    @staticmethod
    @abstractmethod
    def check(settings: Any) -> None:
        """Refuses, before any data are read, the model that can't be."""

    @abstractmethod
    def config(self) -> Any:
        """The config of the model that the settings ask for, with what the data say."""

    def model(self) -> PreTrainedModel:
        return self.classes()[1](self.config())

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], report: Report) -> Task:
        """The task with data to measure a trained model on, and nothing to train: `sources`, or, where there are none, what
        its run held out.

        UserError where the run held nothing out, or its data are no longer those that it began with.
        """
        raise UserError(f"tarnn eval does not measure the task {cls.name}.")

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """`sums` of a batch, and what `details` needs of each of its examples."""
        return self.sums(model, batch), []

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """More about all examples than sums can say: a confusion table, errors per word, a standard error."""
        return {}

    @abstractmethod
    def rows(self) -> dict[str, str]:
        """Lines about the data, for the table of settings."""

    @abstractmethod
    def step_row(self, per_step: int) -> str:
        """What a step is, for the same table."""

    def run_facts(self) -> dict[str, Any]:
        """More for settings.json."""
        return {}

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """What a trained model says of each input: its "output", and more for JSON. For tasks whose `next` is predict.

        reader: the tokenizer, or, where inputs are files of sound, the front end that makes frames of them.
        """
        raise NotImplementedError


TASKS: dict[str, type[Task]] = {}


def register(task: type[Task]) -> type[Task]:
    """Makes a task known by its name; its settings learn whose they are."""
    TASKS[task.name] = task
    task.settings_class.task = task.name
    return task


def task_of(config: Mapping[str, Any]) -> type[Task] | None:
    """The task of a model with that config.json: by its architecture, or, without a known one, by its model_type."""
    names, kind = config.get("architectures"), config.get("model_type")
    alike = [task for task in TASKS.values() if task.model_type == kind]
    named = [task for task in alike if isinstance(names, list) and task.architecture in names]
    return next(iter(named or alike), None)


def facts_of_held_out(trained: Trained, task: type[Task]) -> Any:
    """What settings.json says of what a run held out; UserError where it held nothing out."""
    if trained.saved is None:
        raise UserError(
            f"{trained.folder} holds no settings.json, which says what a run held out. {name_data(trained)}"
        )
    facts = (trained.saved.get(task.of) or {}).get("validation")
    if not facts or 0 in (facts.get("tokens"), facts.get("rows")):
        raise UserError(f"the run in {trained.folder} held nothing out. {name_data(trained)}")
    return facts


def name_data(trained: Trained) -> str:
    return f"Name the data: `tarnn eval {trained.folder} DATA`."


def refuse_other_held_out(trained: Trained, task: type[Task], now: Any) -> None:
    """UserError where the sources of a run hold other data than those that it held out; `now` are their facts."""
    if facts_of_held_out(trained, task) != now:
        raise UserError(
            f"{', '.join(trained.settings.sources)} no longer hold what the run in {trained.folder} held out. "
            f"{name_data(trained)}"
        )


def own_options(task: str) -> dict[str, Field]:
    """The options that not every task has."""
    shared = {f.name for f in fields(RunSettings)}
    return {f.name: f for f in fields(TASKS[task].settings_class) if f.name not in shared}
