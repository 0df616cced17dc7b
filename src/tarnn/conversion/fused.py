"""`generate` of converted models by the fused step, on a cache of constant size."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import nn
from transformers import Cache

from tarnn.conversion.cache import ConstantCache, HybridCacheLayer
from tarnn.conversion.described import classes_of, is_described
from tarnn.conversion.interface import warn_beyond
from tarnn.conversion.layer import HeadStates
from tarnn.conversion.options import DEFAULTS, attention_layers, child_of, converted_layers, tell
from tarnn.decoding.fused import Classes, FusedStep
from tarnn.decoding.hybrid import Hybrid
from tarnn.decoding.parts import Attention
from tarnn.huggingface.fused_forward import SMALLEST_CACHE, FusedForward, ask_first
from tarnn.huggingface.versions import CACHE, NAMES, for_generate
from tarnn.ops import State

# arguments of `generate`, and settings of a model, with which another cache is made or meant; an assistant's is cropped unasked
OTHER_CACHE = (*NAMES, "cache_implementation", "assistant_model", "prompt_lookup_num_tokens", "is_assistant")


class ConvertedForward(FusedForward):
    """The fused step of a converted model, on top of a `constant_cache`."""

    def __init__(self, model: Any, weights: str | None, warmup_tokens: int):
        super().__init__(model, weights, warmup_tokens)
        self.modules = attention_layers(model)
        lengths = (x.options.get("far_until") for x in converted_layers(model).values() if x.feature_map is not None)
        self.calibrated_on = min((x for x in lengths if x is not None), default=None)

    def classes(self) -> Classes:
        return classes_of(self.model)

    def knows(self, cache: Cache) -> bool:
        layers = cast(Sequence[Any], cache.layers)
        if len(layers) != len(self.modules) or not all(type(x) is HybridCacheLayer and x.writable for x in layers):
            return False
        owned = all(x.owner is None or x.owner() is module for x, module in zip(layers, self.modules))
        return owned and len({x.is_initialized for x in layers}) == 1

    def states(self, step: FusedStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
        layers = cast(Sequence[Any], cache.layers)
        if not layers[0].is_initialized:
            return new_states(step, rows, max(SMALLEST_CACHE, num_tokens))
        return tuple(part for x in layers for part in x.writable_state(num_tokens).parts)

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        layers, rest = cast(Sequence[Any], cache.layers), iter(states)
        for layer, module in zip(layers, self.modules, strict=True):
            layer.claim(module)
            count = len(set(cast(Any, child_of(module)).modes))
            layer.set_first(HeadStates(tuple(next(rest) for _ in range(count))), layer.num_tokens + num_tokens)
        if self.calibrated_on is not None:
            warn_beyond(self.calibrated_on, None, layers[0].num_tokens)


def new_states(step: FusedStep, rows: int, capacity: int) -> tuple[State, ...]:
    """The states before the first token, of all layers; capacity: of the caches of heads that keep all keys."""
    layers = (cast(Attention, x) for x in step.attentions)
    parts = (cast(Hybrid, x.hybrid).new_states(x.heads[2], x.num_features, rows, capacity) for x in layers)
    return tuple(chain.from_iterable(parts))


def arguments_of(model: Any, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Arguments of `generate` with a cache of constant size, where they ask for no other; None: the model is not converted."""
    if model.config._attn_implementation not in DEFAULTS or not converted_layers(model):
        return None
    settings = vars(given.get("generation_config") or model.generation_config) | dict(given)
    if settings.get("use_cache") is False or any(settings.get(x) for x in OTHER_CACHE):
        return for_generate(given)
    return {**given, CACHE: ConstantCache(model)}


def ask_for(model: nn.Module) -> None:
    """Let models of this class ask the fused step, where it knows their family."""
    if is_described(model):
        ask_first(type(model), ConvertedForward, arguments_of)


tell(ask_for)
