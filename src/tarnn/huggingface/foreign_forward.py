"""`forward` and `generate` of transformers' models by the fused step, on transformers' own cache."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from tarnn.decoding.fused import FusedStep
from tarnn.huggingface.foreign_cache import ForeignLayers, tensors_of
from tarnn.huggingface.fused_forward import FusedForward, asking, entering
from tarnn.ops import State


class ForeignForward(FusedForward):
    """The fused step of a model of transformers, on top of transformers' own cache."""

    def __init__(self, model: Any, weights: str | None, warmup_tokens: int):
        super().__init__(model, weights, warmup_tokens)
        self._layers = ForeignLayers()
        self._mask: Tensor | None = None

    def __call__(self, input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep=0) -> Tensor | None:
        if cache is None or input_ids is None or not isinstance(attention_mask, Tensor | None):
            return None  # without a cache, or with one whose masks are made before
        if attention_mask is not None and is_linear(cache):
            attention_mask = attention_mask[:, -input_ids.shape[1] :]  # of what it holds nobody asks any more
        masked = attention_mask is not None and not bool(attention_mask.all())
        if masked and not _is_left_padded(cache, attention_mask, input_ids):
            return None  # `forward` refuses it, or keeps keys in another order
        self._mask = attention_mask.bool() if masked and not is_linear(cache) else None
        return super().__call__(input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep)

    def knows(self, cache: Cache) -> bool:
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        if not {type(x) for x in cache.layers} <= {DynamicLayer, LinearAttentionLayer}:
            return False
        there = [tensors_of(x) for x in cache.layers]
        plain = all(x.dtype == torch.float32 and x.is_cpu for tensors in there for x in tensors)
        recording = any(getattr(x, "record_past", False) for x in cache.layers)
        return len({bool(x) for x in there}) == 1 and plain and not recording

    def past(self, cache: Cache) -> int:
        return 0 if is_linear(cache) else super().past(cache)

    def states(self, step: FusedStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
        mask = None if self._mask is None else self._mask[:, : self.past(cache)]
        layers = zip(cache.layers, step.new_row)
        return tuple(self._layers.state(layer, like, rows, num_tokens, mask) for layer, like in layers)

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        for layer, state in zip(cast(Any, cache.layers), states, strict=True):
            self._layers.give(layer, state, self._mask)


def is_linear(cache: Any) -> bool:
    """Whether it has no keys and values, and so counts no tokens."""
    return all(type(x) is LinearAttentionLayer for x in cache.layers)


def _is_left_padded(cache: Any, mask: Tensor, ids: Tensor) -> bool:
    """Whether all padding comes before a row's first token: none among tokens that go on with a cache."""
    gaps = bool(tensors_of(cache.layers[0])) and not bool(mask[:, -ids.shape[1] :].all())
    return not gaps and bool((mask.long().diff(dim=1) >= 0).all())


def foreign_head(forward: Any) -> Any:
    """`forward` of a model that asks the fused step first."""
    return asking(forward, ForeignForward)


def foreign_generate(generate: Any) -> Any:
    """`generate` that enters the fused step."""
    return entering(generate, lambda model, arguments: arguments)
