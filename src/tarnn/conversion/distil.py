"""Losses of a converted model against its own softmax attention, layer by layer or through its logits.

Stage 1 trains maps and λ alone. A layer's inputs are the original's, and its loss per head is

    |o − ô|²/mean |o|²  +  Σ_far p log(p/p̂)  +  (ℓ^R − ℓ̂^R)²/10

with p, p̂ the weights of the far keys among themselves, and ℓ^R the log of their sum. Through the output alone a map would
hardly be trained, since the window does the work. Stage 2 trains weights by KL(softmax's tokens ‖ the converted model's).
"""

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tarnn.conversion.calibration import ExactKeys, estimated_logits, far_share, features_of, logit_blocks, softmax_mean
from tarnn.conversion.capture import AttentionInputs, capturing, keep_softmax
from tarnn.conversion.layer import LayerAttention
from tarnn.conversion.options import converted_layers

SCHEDULE = (0.9, 0.75, 0.5)  # probabilities that the window is dropped, in thirds of the training


def layer_loss(own: LayerAttention, inputs: AttentionInputs, keys: ExactKeys) -> Tensor:
    """Stage 1's loss of one layer's heads that have features; a call with one row."""
    assert own.feature_map is not None
    q, k, v = (own.select_heads(x, "features").detach() for x in inputs[:3])
    bias = own.select_heads(own.far_bias[None], "features")[0]
    inputs = inputs._replace(q=q, k=k, v=v)
    phi = features_of(own.feature_map, inputs)
    error = norm = divergence = mass = torch.zeros((), device=q.device)
    queries = 0
    for block in logit_blocks(inputs, keys):
        has_far = (block.far[0] > -torch.inf).any(-1)  # queries that have far keys
        if not has_far.any():
            continue
        teacher = block.far[:, has_far]
        o_exact, exact = softmax_mean(block.exact[:, has_far], block.values)
        o_far, far = softmax_mean(teacher, block.values)
        logits = estimated_logits(block, phi)[:, has_far] + bias[:, None, None]
        o_phi, estimated = softmax_mean(logits, block.values)
        rho, rho_phi = far_share(far, exact)[..., None], far_share(estimated, exact)[..., None]
        o = o_exact + rho * (o_far - o_exact)
        error = error + (o - o_exact - rho_phi * (o_phi - o_exact)).square().sum()
        norm = norm + o.square().sum()
        gap = far - estimated
        log_ratio = (teacher - logits).masked_fill(teacher == -torch.inf, 0.0)
        divergence = divergence + ((teacher.softmax(-1) * log_ratio).sum(-1) - gap).sum()
        mass = mass + gap.square().sum()
        queries += gap.numel()
    return error / norm.clamp(min=1e-12) + (divergence + 0.1 * mass) / max(queries, 1)


class Distillation(nn.Module):
    """A model and which of its parameters are trained, as the Trainer expects it: called with ids, it returns a loss.

    Only the trained parameters are its own, so that checkpoints hold these alone.
    """

    def __init__(self, model: Any, names: Iterable[str]):
        super().__init__()
        parameters = dict(model.named_parameters())
        self.trained = nn.ParameterDict({name.replace(".", "/"): parameters[name] for name in names})
        self._unregistered = [model]  # in a list: not a module of ours
        for name, parameter in parameters.items():
            parameter.requires_grad_(name.replace(".", "/") in self.trained)

    @property
    def model(self) -> Any:
        """The model in training: of transformers, or one of peft around it."""
        return self._unregistered[0]


class MapLosses(Distillation):
    """Stage 1. The layers' losses flow back one by one, so that one layer's weights are in memory at a time."""

    def __init__(self, model: PreTrainedModel, keys: ExactKeys):
        super().__init__(model, [name for name, _ in model.named_parameters() if ".tarnn." in name])
        self.keys = keys

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        losses: list[Tensor] = []
        layers = converted_layers(self.model)

        def add_loss(i: int, inputs: AttentionInputs) -> None:
            if i in layers and layers[i].feature_map is not None:
                with torch.enable_grad():
                    losses.append(layer_loss(layers[i], inputs, self.keys))

        for ids in input_ids:
            with torch.no_grad(), capturing(self.model, add_loss):
                self.model(input_ids=ids[None], **self.shifted_positions(ids))
        return {"loss": torch.stack(losses).sum() / len(input_ids)}

    def shifted_positions(self, ids: Tensor) -> dict[str, Any]:
        """Positions that begin anywhere: a learned map must not depend on them if rotary logits don't."""
        options: dict[str, Any] = {"use_cache": False} if self.model.can_generate() else {}
        if getattr(self.model.config, "rope_parameters", None):
            start = random.randrange(len(ids))
            options["position_ids"] = torch.arange(start, start + len(ids), device=ids.device)[None]
        return options


class TokenLosses(Distillation):
    """Stage 2: KL to the original's tokens.

    original: the model before training; None: the same weights without adapters (LoRA).
    """

    calls: Tensor

    def __init__(
        self, model: Any, names: Iterable[str], original: PreTrainedModel | None, steps: int, drop_window: bool
    ):
        super().__init__(model, names)
        self._unregistered.append(original)
        self.steps, self.drop_window = steps, drop_window
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # in checkpoints: the schedule's position

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.softmax_logits(input_ids).float().log_softmax(-1)
        stage = min(2, 3 * int(self.calls) // max(self.steps, 1))
        self.calls += 1
        is_dropped = self.drop_window and random.random() < SCHEDULE[stage]
        layers = list(converted_layers(self.model).values())
        options = [layer.options for layer in layers]
        try:
            for layer in layers:
                layer.options = layer.options | ({"window": 1} if is_dropped else {})
            logits = self.model(input_ids=input_ids, use_cache=False).logits.float().log_softmax(-1)
        finally:
            for layer, before in zip(layers, options):
                layer.options = before
        loss = nn.functional.kl_div(logits, target, reduction="none", log_target=True).sum(-1).mean()
        return {"loss": loss}

    def softmax_logits(self, ids: Tensor) -> Tensor:
        original = self._unregistered[1]
        if original is not None:
            return original(input_ids=ids, use_cache=False).logits
        with self.model.disable_adapter(), capturing(self.model.get_base_model(), keep_softmax):
            return self.model(input_ids=ids, use_cache=False).logits
