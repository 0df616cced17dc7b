"""Which models of transformers `tarnn eval` measures."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def is_causal_lm(model: Any) -> bool:
    """Whether the model predicts the next token of a text."""
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
