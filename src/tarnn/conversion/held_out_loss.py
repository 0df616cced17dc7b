"""Measure the loss by a conversion on rows that were not used for calibration."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tarnn.conversion.calibration import ExactKeys
from tarnn.conversion.capture import AttentionInputs, Callback, capturing, keep_softmax
from tarnn.conversion.options import converted_layers
from tarnn.conversion.rows import Row, run_model
from tarnn.ops.hybrid.op import hybrid_attention


class HeldOutLoss:
    """Cross-entropy of a model that generates; of others the error of the last hidden state against softmax attention."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row]):
        self.model, self.rows, self.generates = model, rows, model.can_generate()
        self.unit = "nats per token" if self.generates else "squared error of the last hidden state, relative"
        self.targets: list[Tensor] = []
        if not self.generates:
            with torch.no_grad(), capturing(model, keep_softmax):
                self.targets = [run_model(model, row)[0] for row in rows]
        self.softmax = self.loss(keep_softmax)

    @torch.no_grad()
    def loss(self, callback: Callback | None = None) -> float:
        """The mean over rows, with the attention that the model runs now, or that of `capturing` with this callback."""
        losses = []
        with nullcontext() if callback is None else capturing(self.model, callback):
            for n, row in enumerate(self.rows):
                o = run_model(self.model, row)[0].float()
                if self.generates:
                    loss = torch.nn.functional.cross_entropy(o[0, :-1], row["input_ids"][0, 1:])
                else:
                    target = self.targets[n].float()
                    loss = (o - target).square().sum() / target.square().sum()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def with_window(self, keys: ExactKeys) -> float:
        """The loss with window, sinks and slots alone in every layer."""

        def attend(i: int, x: AttentionInputs) -> Tensor:
            options = {"causal": x.causal, "scale": x.scale, "key_mask": x.key_mask, **keys._asdict()}
            return hybrid_attention(x.q, x.k, x.v, **options)

        return self.loss(attend)

    def with_one_layer(self, layer: int) -> float:
        """The loss with hybrid attention in this layer alone."""
        own = converted_layers(self.model)[layer]
        keys = {name: own.options[name] for name in ExactKeys._fields}

        def attend(i: int, x: AttentionInputs) -> Tensor | None:
            options = {"causal": x.causal, "scale": x.scale, "key_mask": x.key_mask, **keys}
            return own(x.q, x.k, x.v, **options)[0] if i == layer else None

        return self.loss(attend)
