"""Language models of transformers that have a fused step: which there are, and how they are described for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tarnn.conversion import described as softmax
from tarnn.conversion.opening import open_pretrained, read_config
from tarnn.errors import UserError
from tarnn.huggingface import described as linear
from tarnn.log import Log, silent

OPEN = {  # model_type → the family's name
    "llama": "Llama",
    "mamba2": "Mamba-2",
    "mistral": "Mistral",
    "olmo_hybrid": "OLMo-hybrid",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_next": "Qwen3-Next without experts",
}


def open_causal(folder: Path, report: Log = silent) -> Any:
    """Open the language model in a folder of one of these families. Raises UserError as `open_pretrained` does, and for
    another family, before a weight is read."""
    fields = read_config(folder)
    if not isinstance(kind := fields.get("model_type"), str) or kind not in OPEN:
        raise UserError(f"{folder} holds a model of another kind: {kind!r:.60}. {families()}")
    model = open_pretrained(folder, converted=False, text_only=True, report=report)
    if not model.can_generate():
        raise UserError(
            f"{folder} holds a {type(model).__name__}, which writes no text; expected one of the causal language models."
        )
    return model


def families() -> str:
    """Return the sentence that lists the families."""
    return f"Models of tarnn open, and of transformers {', '.join(dict.fromkeys(OPEN.values()))}."


def classes_of(model: nn.Module) -> Mapping[type, Callable[..., Any]]:
    """Return the descriptions of a model's modules. Raises UserError for a model of another family."""
    if softmax.is_described(model):
        return softmax.classes_of(model)
    path = type(model).__module__.split(".")
    if path[:2] != ["transformers", "models"] or path[2] not in linear.FILES:
        raise UserError(f"there is no fused step for a {type(model).__name__}. {families()}")
    return linear.classes_of(model)
