"""Explain why a model has no fused step."""

from typing import Any

from tarnn.decoding.fused import refusal
from tarnn.huggingface.foreign_forward import foreign_generate
from tarnn.huggingface.fused_forward import FusedForward, active, why_too_large
from tarnn.huggingface.patching.families import FAMILIES
from tarnn.models.backbone import TextModel
from tarnn.models.images import ImageModel

WITH_STEP = [family.name for family in FAMILIES if any(hook.replace is foreign_generate for hook in family.hooks)]


def why_not_fused(model: Any) -> str | None:
    """Why `model.generate` computes token after token by `forward`, a sentence without its full stop; None: it does not.

    What a single call leaves to `forward`, such as one with `output_hidden_states`, is in docs/generation.md.
    """
    maker = getattr(model.forward, "maker", FusedForward)
    if maker is FusedForward and not isinstance(model, TextModel | ImageModel):
        return (
            f"generate of {type(model).__name__} knows no fused step: tarnn's own models have one, converted Llamas and their "
            f"relatives, and under tarnn.patch_transformers() {', '.join(WITH_STEP)}"
        )
    if (why := refusal(model)) is not None:
        return why
    return why_too_large(model) if active(model) is None else None
