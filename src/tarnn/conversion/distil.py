"""What a converted model is trained on: its own softmax attention, layer by layer or through its logits.

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

from tarnn.conversion.calibration import Near, blocks, estimate, far_logits, mean_of, share
from tarnn.conversion.capture import Seen, watching
from tarnn.conversion.layer import LayerAttention
from tarnn.conversion.options import attention_layers, child_of

SCHEDULE = (0.9, 0.75, 0.5)  # with which the window is dropped, in thirds of the training


def layer_loss(own: LayerAttention, seen: Seen, near: Near) -> Tensor:
    """Stage 1's loss of one layer's heads that have features; a call with one row."""
    q, k, v = (own.of_mode(x, "features").detach() for x in seen[:3])
    bias = own.of_mode(own.far_bias[None], "features")[0]
    seen = seen._replace(q=q, k=k, v=v)
    phi = estimate(own.feature_map, seen)
    error = norm = divergence = mass = torch.zeros((), device=q.device)
    queries = 0
    for block in blocks(seen, near):
        some = (block.far[0] > -torch.inf).any(-1)  # queries that have far keys
        if not some.any():
            continue
        o_exact, exact = mean_of(block.exact[:, some], block.values)
        o_far, far = mean_of(teacher := block.far[:, some], block.values)
        logits = far_logits(block, phi)[:, some] + bias[:, None, None]
        o_phi, estimated = mean_of(logits, block.values)
        rho, found = share(far, exact)[..., None], share(estimated, exact)[..., None]
        o = o_exact + rho * (o_far - o_exact)
        error = error + (o - o_exact - found * (o_phi - o_exact)).square().sum()
        norm = norm + o.square().sum()
        gap = far - estimated
        between = (teacher - logits).masked_fill(teacher == -torch.inf, 0.0)
        divergence = divergence + ((teacher.softmax(-1) * between).sum(-1) - gap).sum()
        mass = mass + gap.square().sum()
        queries += gap.numel()
    return error / norm.clamp(min=1e-12) + (divergence + 0.1 * mass) / max(queries, 1)


class Distillation(nn.Module):
    """A model and what is trained of it, as the Trainer wants it: called with ids, it gives a loss.

    Only the trained parameters are its own, so that checkpoints hold these alone.
    """

    def __init__(self, model: Any, names: Iterable[str]):
        super().__init__()
        parameters = dict(model.named_parameters())
        self.trained = nn.ParameterDict({name.replace(".", "/"): parameters[name] for name in names})
        self._others = [model]  # in a list: not a module of ours
        for name, parameter in parameters.items():
            parameter.requires_grad_(name.replace(".", "/") in self.trained)

    @property
    def model(self) -> Any:
        return self._others[0]


class MapLosses(Distillation):
    """Stage 1. The layers' losses flow back one by one, so that one layer's weights are in memory at a time."""

    def __init__(self, model: Any, near: Near):
        names = [name for name, _ in model.named_parameters() if ".tarnn." in name]
        super().__init__(model, names)
        self.near = near

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        losses: list[Tensor] = []
        layers = [child_of(x) for x in attention_layers(self.model)]

        def look(i: int, seen: Seen) -> None:
            own = layers[i]
            if own is not None and own.feature_map is not None:
                with torch.enable_grad():
                    losses.append(layer_loss(own, seen, self.near))

        for ids in input_ids:
            with torch.no_grad(), watching(self.model, look):
                self.model(input_ids=ids[None], **self.moved(ids))
        return {"loss": torch.stack(losses).sum() / len(input_ids)}

    def moved(self, ids: Tensor) -> dict[str, Any]:
        """Positions that begin anywhere: a learned map must not depend on them where rotary logits don't."""
        options: dict[str, Any] = {"use_cache": False} if self.model.can_generate() else {}
        if getattr(self.model.config, "rope_parameters", None):
            start = random.randrange(len(ids))
            options["position_ids"] = torch.arange(start, start + len(ids), device=ids.device)[None]
        return options


class TokenLosses(Distillation):
    """Stage 2: KL to the original's tokens. `original` is the model that it was converted from, or None: the same
    weights without adapters (LoRA)."""

    calls: Tensor

    def __init__(self, model: Any, names: Iterable[str], original: Any, steps: int, drop_window: bool):
        super().__init__(model, names)
        self._others.append(original)
        self.steps, self.drop_window = steps, drop_window
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # in checkpoints: where the schedule stands

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.softmax_logits(input_ids).float().log_softmax(-1)
        stage = min(2, 3 * int(self.calls) // max(self.steps, 1))
        self.calls += 1
        dropped = self.drop_window and random.random() < SCHEDULE[stage]
        layers = [x for x in map(child_of, attention_layers(self.model)) if x is not None]
        kept = [x.options for x in layers]
        try:
            for layer in layers:
                layer.options = layer.options | ({"window": 1} if dropped else {})
            found = self.model(input_ids=input_ids, use_cache=False).logits.float().log_softmax(-1)
        finally:
            for layer, options in zip(layers, kept):
                layer.options = options
        loss = nn.functional.kl_div(found, target, reduction="none", log_target=True).sum(-1).mean()
        return {"loss": loss}

    def softmax_logits(self, ids: Tensor) -> Tensor:
        original = self._others[1]
        if original is not None:
            return original(input_ids=ids, use_cache=False).logits
        with self.model.disable_adapter(), watching(self.model.get_base_model(), lambda i, seen: None):
            return self.model(input_ids=ids, use_cache=False).logits
