"""`generate` of converted models by the fused step, on a cache of constant size."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers import Cache

from tarnn.conversion.cache import ConstantCache, HybridCacheLayer
from tarnn.conversion.interface import warn_beyond
from tarnn.conversion.layer import HeadStates
from tarnn.conversion.options import DEFAULTS, attention_layers, child_of, converted_layers, tell
from tarnn.decoding.live import has_family
from tarnn.huggingface.foreign_cache import new_state
from tarnn.huggingface.foreign_forward import ForeignForward, Special, adapter_of, special
from tarnn.huggingface.fused_forward import ask_first
from tarnn.huggingface.versions import CACHE, NAMES, for_generate
from tarnn.ops import State

# arguments of `generate`, and settings of a model, with which another cache is made or meant; an assistant's is cropped unasked
OTHER_CACHE = (*NAMES, "cache_implementation", "assistant_model", "prompt_lookup_num_tokens", "is_assistant")


class ConvertedForward(ForeignForward):
    """The fused step of a converted model, on top of a `constant_cache`, whose other layers are transformers'."""

    caches = (ConstantCache,)

    def __init__(self, model: Any, weights: str | None, requested: bool):
        super().__init__(model, weights, requested)
        self.modules = {getattr(x, "layer_idx", i): x for i, x in enumerate(attention_layers(model))}
        lengths = (x.options.get("far_until") for x in converted_layers(model).values() if x.feature_map is not None)
        self.calibrated_on = min((x for x in lengths if x is not None), default=None)

    def knows(self, cache: Cache) -> bool:
        layers = {i: x for i, x in enumerate(cast(Sequence[Any], cache.layers)) if type(x) is HybridCacheLayer}
        owned = all(x.owner is None or x.owner() is self.modules.get(i) for i, x in layers.items())
        return layers.keys() == self.modules.keys() and owned and super().knows(cache)

    def takes(self, layer: Any) -> bool:
        return layer.writable if type(layer) is HybridCacheLayer else super().takes(layer)

    def begun(self, layer: Any) -> bool:
        return layer.state is not None if type(layer) is HybridCacheLayer else super().begun(layer)

    def num_states(self, number: int) -> int:
        return len(set(cast(Any, child_of(self.modules[number])).modes)) if number in self.modules else 1

    def layer_states(
        self, layer: Any, likes: Sequence[State], rows: int, num_tokens: int, mask: Tensor | None
    ) -> Sequence[State]:
        if type(layer) is not HybridCacheLayer:
            return super().layer_states(layer, likes, rows, num_tokens, mask)
        if layer.state is None:
            return [new_state(like, rows, num_tokens, self.model.dtype) for like in likes]
        return layer.writable_state(num_tokens).parts

    def _is_left_padded(self, cache: Any, mask: Tensor, ids: Tensor) -> bool:
        """States of converted layers know what is padding; caches of others don't."""
        return all(type(x) is HybridCacheLayer for x in cache.layers) or super()._is_left_padded(cache, mask, ids)

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        for i, module in self.modules.items():
            cast(Any, cache.layers[i]).claim(module)
        super().keep(cache, states, num_tokens)
        if self.calibrated_on is not None:
            warn_beyond(self.calibrated_on, None, cache.get_seq_length())

    def keep_layer(self, layer: Any, states: Sequence[State], num_tokens: int) -> None:
        if type(layer) is HybridCacheLayer:
            layer.set_first(HeadStates(tuple(states)), layer.num_tokens + num_tokens)
        else:
            super().keep_layer(layer, states, num_tokens)


def is_converted(model: Any) -> bool:
    """Whether a model runs the attention that its layers were given."""
    return model.config._attn_implementation in DEFAULTS and bool(converted_layers(model))


def with_cache(model: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of `generate` with a cache of constant size, unless they ask for another."""
    settings = vars(given.get("generation_config") or model.generation_config) | dict(given)
    if settings.get("use_cache") is False or any(settings.get(x) for x in OTHER_CACHE):
        return for_generate(given)
    return {**given, CACHE: ConstantCache(model)}


def ask_for(model: nn.Module) -> None:
    """Let converted models of this class ask the fused step, if there are programs of its family."""
    if has_family(model) and type(model).__name__.endswith("ForCausalLM"):
        ask_first(type(model), adapter_of, lambda x, given: with_cache(x, given) if is_converted(x) else None)


special.append(Special(is_converted, ConvertedForward, with_cache))
tell(ask_for)
