"""Logits of whole texts by the fused step: what a model says with weights of fewer bits, as it says it while it generates."""

from types import SimpleNamespace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tarnn.decoding.fused import FusedStep


class FusedLogits:
    """A causal model whose `forward` is `FusedStep.prefill` from an empty state. Raises Refusal where it has no fused step."""

    def __init__(self, model: Any, weights: str):
        self.model, self.step = model, FusedStep(model, weights)
        self.device, self.config = model.device, model.config

    def eval(self) -> "FusedLogits":
        return self

    def __call__(self, input_ids: Int[Tensor, "b t"], use_cache: bool = False) -> SimpleNamespace:
        """logits (b, t, v), float32."""
        state = self.model.new_state(*input_ids.shape)
        return SimpleNamespace(logits=self.step.prefill(input_ids, state, inplace=True, every=True)[0])
