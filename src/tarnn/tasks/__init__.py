"""Tasks: what a model is trained for. One folder per task, and one registry, `TASKS`."""

from tarnn.tasks.base import TASKS, Sample, Task, Trained, own_options, register, task_of
from tarnn.tasks.settings import RunSettings
from tarnn.tasks.text.task import TextSettings, TextTask

# isort: split
from tarnn.tasks.images.task import ImageSettings, ImageTask  # after text, which is listed first
from tarnn.tasks.labels.task import ClassificationSettings, ClassificationTask
from tarnn.tasks.labels.words import TokenClassificationSettings, TokenClassificationTask
from tarnn.tasks.pairs.task import Seq2SeqSettings, Seq2SeqTask
from tarnn.tasks.speech.task import CtcSettings, CtcTask
from tarnn.tasks.text.masked import MaskedLMSettings, MaskedLMTask

__all__ = [
    "TASKS",
    "ClassificationSettings",
    "ClassificationTask",
    "CtcSettings",
    "CtcTask",
    "ImageSettings",
    "ImageTask",
    "MaskedLMSettings",
    "MaskedLMTask",
    "RunSettings",
    "Sample",
    "Seq2SeqSettings",
    "Seq2SeqTask",
    "Task",
    "TextSettings",
    "TextTask",
    "TokenClassificationSettings",
    "TokenClassificationTask",
    "Trained",
    "own_options",
    "register",
    "task_of",
]
