"""Logits of whole texts by a step: what a model says with weights of fewer bits, as it says it while it generates."""

from types import SimpleNamespace

import torch
from jaxtyping import Int
from torch import Tensor

from tarnn.decoding.opened import Opened
from tarnn.program.runtime import Runtime


class OpenedLogits:
    """An opened model whose `forward` is its `prefill` from an empty state. Raises ValueError for a model's own step."""

    def __init__(self, opened: Opened):
        if opened.weights is None and not isinstance(opened.step, Runtime):
            raise ValueError(f"this model has no fused step: {'; '.join(opened.about)}. Call the model itself.")
        self.opened, self.config = opened, opened.config
        self.device = torch.device("cpu")

    def eval(self) -> "OpenedLogits":
        return self

    def __call__(self, input_ids: Int[Tensor, "b t"], use_cache: bool = False) -> SimpleNamespace:
        """logits (b, t, v), float32."""
        state = self.opened.new_state(*input_ids.shape)
        return SimpleNamespace(logits=self.opened.prefill(input_ids, state, inplace=True, every=True)[0])
