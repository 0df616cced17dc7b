"""transformers' linear models by the fused step: what stands in its caches, as states that the kernel writes, and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from tarnn.attention.mamba2 import Mamba2State
from tarnn.decoding.fused import Classes, FusedStep
from tarnn.huggingface.described import classes_of
from tarnn.huggingface.fused_forward import SMALLEST_CACHE, FusedForward, asking, entering
from tarnn.huggingface.versions import hold_keys
from tarnn.ops import KVCache, State


class _Written(NamedTuple):
    """The result of a step in a cache: a state per layer, the layers' views of it, and which tokens count."""

    states: Sequence[Any]
    tensors: list[tuple[Tensor, ...]]
    mask: Tensor | None


class DescribedForward(FusedForward):
    """The fused step of a model that `described` describes, on top of transformers' own cache.

    A layer of the cache gets views of the state that the kernel writes, so `forward` may go on with it at any token. Whether it,
    or anybody else, did is seen by whether these very tensors are still there.
    """

    def __init__(self, model: Any, weights: str | None, warmup_tokens: int):
        super().__init__(model, weights, warmup_tokens)
        self._written: WeakKeyDictionary[Cache, _Written] = WeakKeyDictionary()
        self._mask: Tensor | None = None

    def __call__(self, input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep=0) -> Tensor | None:
        if cache is None or input_ids is None or not isinstance(attention_mask, Tensor | None):
            return None  # without a cache, or with one whose masks are made before
        if attention_mask is not None and _is_linear(cache):
            attention_mask = attention_mask[:, -input_ids.shape[1] :]  # of what it holds nobody asks any more
        masked = attention_mask is not None and not bool(attention_mask.all())
        if masked and _has_gaps(cache, attention_mask, input_ids):
            return None  # what `forward` refuses
        self._mask = attention_mask.bool() if masked and not _is_linear(cache) else None
        return super().__call__(input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep)

    def classes(self) -> Classes:
        return classes_of(self.model)

    def knows(self, cache: Cache) -> bool:
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        if not {type(x) for x in cache.layers} <= {DynamicLayer, LinearAttentionLayer}:
            return False
        there = [_tensors(x) for x in cache.layers]
        plain = all(x.dtype == torch.float32 and x.is_cpu for tensors in there for x in tensors)
        recording = any(getattr(x, "record_past", False) for x in cache.layers)
        return len({bool(x) for x in there}) == 1 and plain and not recording

    def past(self, cache: Cache) -> int:
        return 0 if _is_linear(cache) else super().past(cache)

    def states(self, step: FusedStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
        written = self._written.pop(cache, None)
        past = self.past(cache)
        mask = None if self._mask is None else self._mask[:, :past]
        if written is not None and _same(written, cache, mask):
            return tuple(_with_room(x, num_tokens) for x in written.states)
        if not _tensors(cache.layers[0]):
            new = (x.map(lambda y: torch.zeros(rows, *y.shape[1:], device="cpu")) for x in step.new_row)
            return tuple(_with_room(x, num_tokens) for x in new)
        return tuple(_with_room(_state_of(x, y, mask), num_tokens) for x, y in zip(cache.layers, step.new_row))

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        tensors = [_give(x, y) for x, y in zip(cast(Any, cache.layers), states, strict=True)]
        self._written[cache] = _Written(states, tensors, self._mask)


def _is_linear(cache: Any) -> bool:
    """Whether it has no keys and values, and so counts no tokens."""
    return all(type(x) is LinearAttentionLayer for x in cache.layers)


def _has_gaps(cache: Any, mask: Tensor, ids: Tensor) -> bool:
    """Whether there is padding among tokens that go on with a cache."""
    return bool(_tensors(cache.layers[0])) and not bool(mask[:, -ids.shape[1] :].all())


def _tensors(layer: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a cache's layer; none before the first token."""
    if isinstance(layer, DynamicLayer):
        return (cast(Tensor, layer.keys), cast(Tensor, layer.values)) if layer.is_initialized else ()
    return (layer.conv_states[0], layer.recurrent_states[0]) if layer.has_previous_state[0] else ()


def _same(written: _Written, cache: Cache, mask: Tensor | None) -> bool:
    """Whether the cache holds what was written, and the same tokens count."""
    there = [_tensors(x) for x in cache.layers]
    if any(len(x) != len(y) or any(a is not b for a, b in zip(x, y)) for x, y in zip(there, written.tensors)):
        return False
    if mask is None or written.mask is None:
        return (mask is None or bool(mask.all())) and written.mask is None
    return torch.equal(mask, written.mask)


def _state_of(layer: Any, like: Any, mask: Tensor | None) -> State:
    """A copy of what a layer of a cache holds, as the kernel has it."""
    if isinstance(layer, DynamicLayer):
        keys, values = _tensors(layer)
        rows, heads, length, d = keys.shape
        state = KVCache.empty(rows, heads, length + SMALLEST_CACHE, d, values.shape[3])
        return state.append(keys, values, None if mask is None or mask.all() else mask, inplace=True)
    tokens, S = _tensors(layer)
    S = S.mT if isinstance(like, Mamba2State) else S
    return type(like)(*(x.clone(memory_format=torch.contiguous_format) for x in (S, tokens.mT)))


def _with_room(state: Any, num_tokens: int) -> State:
    return state.with_room(num_tokens) if isinstance(state, KVCache) else state


def _give(layer: Any, state: Any) -> tuple[Tensor, ...]:
    """Let a layer of a cache hold views of a state; returns them."""
    if isinstance(layer, DynamicLayer):
        hold_keys(layer, *state.used()[:2])
        return _tensors(layer)
    layer.conv_states[0] = state.tokens.mT
    layer.recurrent_states[0] = state.S.mT if isinstance(state, Mamba2State) else state.S
    layer.conv_kernel_size[0] = state.tokens.shape[1]
    layer.dtype, layer.device = state.tokens.dtype, state.tokens.device
    for begun in (layer.has_previous_state, layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
        begun[0] = True
    return _tensors(layer)


def described_head(forward: Any) -> Any:
    """`forward` of a model that asks the fused step first."""
    return asking(forward, DescribedForward)


def described_generate(generate: Any) -> Any:
    """`generate` that enters the fused step."""
    return entering(generate, lambda model, arguments: arguments)
