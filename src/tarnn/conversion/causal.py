"""Language models of transformers that have a fused step: which there are, and how they are described for it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tarnn.conversion import described as softmax
from tarnn.errors import UserError
from tarnn.huggingface import described as linear

NAMES = "Llama", "Mamba-2", "Mistral", "OLMo-hybrid", "Qwen2", "Qwen3", "Qwen3.5", "Qwen3-Next without experts"


def families() -> str:
    """Return the sentence that lists the families."""
    return f"Models of tarnn open, and of transformers {', '.join(NAMES)}."


def classes_of(model: nn.Module) -> Mapping[type, Callable[..., Any]]:
    """Return the descriptions of a model's modules. Raises UserError for a model of another family."""
    if softmax.is_described(model):
        return softmax.classes_of(model)
    path = type(model).__module__.split(".")
    if path[:2] != ["transformers", "models"] or path[2] not in linear.FILES:
        raise UserError(f"there is no fused step for a {type(model).__name__}. {families()}")
    return linear.classes_of(model)
