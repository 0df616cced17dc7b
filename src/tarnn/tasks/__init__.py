"""Tasks: what a model is trained for. One file per task, and one registry, `TASKS`."""

from tarnn.tasks.base import TASKS, Facts, Task, Trained, own_options, register, task_of
from tarnn.tasks.settings import RunSettings
from tarnn.tasks.text import TextSettings, TextTask

# isort: split
from tarnn.tasks.images import ImageSettings, ImageTask  # after text, which is listed first

# isort: split
from tarnn.tasks.masked_lm import MaskedLMSettings, MaskedLMTask

# isort: split
from tarnn.tasks.classification import ClassificationSettings, ClassificationTask

# isort: split
from tarnn.tasks.ctc import CtcSettings, CtcTask

# isort: split
from tarnn.tasks.seq2seq import Seq2SeqSettings, Seq2SeqTask

# isort: split
from tarnn.tasks.token_classification import TokenClassificationSettings, TokenClassificationTask

__all__ = [
    "TASKS", "ClassificationSettings", "ClassificationTask", "CtcSettings", "CtcTask", "Facts", "ImageSettings", "ImageTask",
    "MaskedLMSettings", "MaskedLMTask", "RunSettings", "Seq2SeqSettings", "Seq2SeqTask", "Task", "TextSettings", "TextTask",
    "TokenClassificationSettings", "TokenClassificationTask",
    "Trained",    "own_options", "register", "task_of",
]  # fmt: skip
