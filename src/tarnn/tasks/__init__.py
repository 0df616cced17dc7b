"""Tasks: what a model is trained for. One folder per task, and one registry, `TASKS`."""

from tarnn.tasks.base import TASKS, Sample, Task, Trained, own_options, register, task_of
from tarnn.tasks.settings import RunSettings
from tarnn.tasks.text.task import TextSettings, TextTask

# isort: split
from tarnn.tasks.images.task import ImageSettings, ImageTask  # after text, which is listed first
from tarnn.tasks.labels import ClassificationSettings, ClassificationTask
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
    "Task",
    "TextSettings",
    "TextTask",
    "Trained",
    "own_options",
    "register",
    "task_of",
]
