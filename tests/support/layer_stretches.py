"""Layers whose sequences ranks share, and by one process; and what is refused where ranks share sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tarnn import Elu, attention, feature_maps, linear_attention, models, ops, step
from tarnn.attention.calibration import calibrating
from tarnn.attention.registry import ATTENTIONS
from tarnn.attention.rotary import Rotary
from tarnn.models.rwkv import RwkvModel
from tarnn.parallel import sequence

Tensors = dict[str, Tensor]
HIDDEN = 16


@dataclass(frozen=True)
class Layer:
    """A layer of a kind, and what it reads, made from their seeds on every rank."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    rotary: int = 0  # the width that is rotated
    lengths: tuple[int, ...] = (7, 5, 0, 8)
    cuts: tuple[int, ...] = ()
    masked: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        options = {"causal": True, **dict(self.options)}
        if self.rotary:
            options["rotary"] = Rotary(self.rotary)
        if "decay" in options:
            options["decay"] = attention.TokenDecay(HIDDEN, 2)
        if isinstance(options.get("feature_map"), str):
            options["feature_map"] = feature_maps.make(options["feature_map"], head_dim=8, num_heads=2, max_length=32)
        return ATTENTIONS.find(self.kind).kind(HIDDEN, 2, **options).double()


def results(case: Layer, start: int, length: int, share: Callable[[], Any]) -> Tensors:
    layer, generator = case.build(), torch.Generator().manual_seed(1)
    rows, total = 1 if case.cuts else 2, sum(case.lengths)
    x = torch.randn(rows, total, HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).narrow(1, start, length)
    options: dict[str, Any] = {}
    if case.masked:
        options["key_mask"] = (torch.rand(rows, total, generator=generator) > 0.3).narrow(1, start, length)
    if case.cuts:
        options["cu_seqlens"] = torch.tensor(case.cuts, dtype=torch.int32)
    mine = x.narrow(1, start, length).clone().requires_grad_()
    with share():
        y = layer(mine, **options)
        (y * weights).sum().backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in layer.named_parameters()}
    found = {"y": y.detach(), "x": mine.grad} | gradients
    return {name: value for name, value in found.items() if value is not None}


def by_one(case: Layer) -> Tensors:
    from contextlib import nullcontext

    return results(case, 0, sum(case.lengths), nullcontext)


def on_rank(group: Any, rank: int, case: Layer) -> Tensors:
    return results(case, sum(case.lengths[:rank]), case.lengths[rank], lambda: sequence(group))


def joined(parts: list[Tensors]) -> Tensors:
    whole = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        whole[name] = torch.cat(each, 1) if name in "yx" else torch.stack(each).sum(0)
    return whole


def _window(**options: Any) -> Callable[[], Any]:
    x = torch.ones(1, 2, 3, 4)
    return lambda: ops.hybrid_attention(x, x, x, window=2, **{"causal": True, **options})


def _step() -> Any:
    x = torch.ones(1, 2, 1, 4)
    return step(x, x, x, Elu(), ops.LinearState.zeros(1, 2, 4, 4))


def _hybrid_step() -> Any:
    x = torch.ones(1, 2, 1, 4)
    state = ops.HybridState.zeros(x, x, 0, window=2, sinks=0)
    return ops.hybrid_step(x, x, x, None, state, window=2)


def _both_sides() -> Any:
    x, decay = torch.ones(1, 2, 3, 4), -torch.ones(2)
    return linear_attention(x, x, x, causal=False, log_decay=decay, log_decay_back=decay)


def _model() -> Any:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return models.TarnnForCausalLM(models.TarnnConfig(**sizes))


def _prefill() -> Any:
    model = _model()
    return model.model.prefill(torch.ones(1, 3, dtype=torch.int64), model.new_state(1))


def _rwkv() -> Any:
    from support.rwkv_models import rwkv_model

    model: RwkvModel = rwkv_model()
    return model.prefill(torch.ones(1, 3, dtype=torch.int64), model.new_state(1))


def _fitted(**options: Any) -> Any:
    phi = feature_maps.Reparametrized(feature_maps.PositiveRandomFeatures(8, 6), num_heads=2, **options)
    return attention.LinearAttention(HIDDEN, 2, causal=False, feature_map=phi)


def _calibrated() -> Any:
    layer = _fitted(fit="calibrated")
    with calibrating(layer):
        return layer(torch.ones(1, 3, HIDDEN))


_IDS = torch.ones(1, 3, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (lambda: _model()(_IDS), "TarnnForCausalLM has no form"),
    "a model's loss": (lambda: _model()(_IDS, labels=_IDS), "shift labels before you cut them"),
    "generate": (lambda: _model().generate(_IDS, max_new_tokens=2), "TarnnForCausalLM has no form"),
    "beams": (lambda: _model().generate(_IDS, max_new_tokens=2, num_beams=2), "TarnnForCausalLM has no form"),
    "a prompt": (_prefill, "TarnnModel has no form"),
    "RWKV": (_rwkv, "RwkvModel has no form"),
    "a layer of RWKV": (
        lambda: Layer("rwkv7").build()(torch.ones(1, 3, HIDDEN).double()),
        "Rwkv7Attention has no form",
    ),
    "a step": (_step, "a step of one token has no form"),
    "a hybrid step": (_hybrid_step, "a step of one token has no form"),
    "decays to both sides": (_both_sides, "linear attention with log_decay_back has no form"),
    "windows to both sides": (_window(causal=False), "hybrid attention to both sides, .* has no form"),
    "hybrid features": (_window(feature_map="favor"), "Take a causal window and sinks alone"),
    "slots": (_window(slots=1), "with slots or with exact_queries has no form"),
    "exact queries": (_window(exact_queries=torch.tensor([0])), "with exact_queries has no form"),
    "weights of softmax": (
        lambda: ops.softmax_attention(*[torch.ones(1, 2, 3, 4)] * 3, causal=True, return_weights=True),
        "return_weights of softmax attention has no form",
    ),
    "a map fitted by the call": (
        lambda: _fitted(fit="call")(torch.ones(1, 3, HIDDEN)),
        "a map that is fitted by the call",
    ),
    "calibration": (_calibrated, "calibration has no form"),
}


def refused(group: Any, rank: int, name: str) -> None:
    with sequence(group):
        REFUSED[name][0]()


def left_behind(group: Any, rank: int) -> list[str]:
    """Names of places that hold something else after a context, and after one that ended in an error, than before."""
    from tarnn.parallel.wrapping import _places

    places = [(owner, name, getattr(owner, name)) for owner, name, _ in _places()]
    inside = []
    for error in (False, True):
        try:
            with sequence(group), sequence(group):
                inside += [name for owner, name, before in places if getattr(owner, name) is before]
                if error:
                    raise KeyError
        except KeyError:
            pass
        inside += [name for owner, name, before in places if getattr(owner, name) is not before]
    return inside
