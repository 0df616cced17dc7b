"""Tasks to train a model for, and their registry, `TASKS`."""

from tarnn.tasks.base import TASKS, Sample, Task, Trained, own_options, register, task_of
from tarnn.tasks.settings import RunSettings
from tarnn.tasks.text.task import MaskedLMSettings, MaskedLMTask, TextSettings, TextTask

# isort: split
from tarnn.tasks.images.task import ImageSettings, ImageTask  # after text, which is listed first
from tarnn.tasks.labels import ClassificationSettings, ClassificationTask
from tarnn.tasks.speech.task import CtcSettings, CtcTask

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
