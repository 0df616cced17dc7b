"""What a task is made of: its settings, data, model, loss, measure and sample. One folder per task.

    @register
    class MyTask(Task): ...

is all that `tarnn train --task NAME` needs, with the options that its settings declare. Length, time, log, checkpoints
and resuming are the same for all tasks, and belong to `tarnn.training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.settings import RunSettings
from tarnn.tasks.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Sampler
    from transformers import PreTrainedModel, TrainingArguments


@dataclass(frozen=True)
class Sample:
    """What a trained model made, at the end of its run."""

    file: Path
    text: str = ""  # to be shown
    about: str = ""  # the file, in words


class Trainable(ABC):
    """Data and their loss, as the trainer takes them."""

    unit: ClassVar[str] = "bits_per_byte"  # of the measure, as the log calls it
    counted: ClassVar[str] = "tokens"  # what progress counts
    rates: ClassVar[tuple[str, ...]] = ()  # what `outcome` counts besides, each a part of the tokens: accuracy
    keeps_model: ClassVar[bool] = True  # whether the run leaves the best model in its folder

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

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss in nats, in float32."""
        return model(**batch)["loss"]

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
    text_column: ClassVar[int] = -1  # of a .tsv file, that `predict` reads
    text_setting: ClassVar[str] = "text_field"  # names the field of other rows, that it reads

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
    def recurrent(cls) -> tuple[Any, Any]:
        """The same for a model that only runs, token after token; without transformers, where it can be."""
        return cls.classes()

    @classmethod
    @abstractmethod
    def check(cls, settings: Any) -> None:
        """Raise UserError for a model that can't be made, before any data are read."""

    @abstractmethod
    def config(self) -> Any:
        """The config of the model that the settings ask for, with what the data say."""

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
