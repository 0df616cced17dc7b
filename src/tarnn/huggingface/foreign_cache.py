"""Map the layers of transformers' caches to states of a program and back: views where the layouts agree, else copies.

    layer of a cache                                   state of a program
    keys, values (b, g, t, d)                          KVCache: the same memory, with room behind it
    recurrent_states (b, h, k, v)                      S, the same memory; of Mamba-2 transposed
    conv_states (b, c, w), the last w inputs           tokens (b, w − 1, c): the filters see no more

`forward` of a model may go on with such a layer at any token. Whether it, or anybody else, did is seen by whether the layer
still holds these very tensors; what `forward` writes into them, it writes into the state.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from tarnn.attention.mamba2 import Mamba2State
from tarnn.huggingface.versions import hold_keys
from tarnn.ops import KVCache, State

SMALLEST_CACHE = 64  # keys for which a softmax layer's cache has room at least


class Given(NamedTuple):
    """A state that a layer holds, the layer's views of it, and which tokens count; None: all."""

    state: Any
    tensors: tuple[Tensor, ...]
    mask: Tensor | None


class ForeignLayers:
    """The layers of transformers' caches that one model has written."""

    def __init__(self) -> None:
        self._given: WeakKeyDictionary[Any, Given] = WeakKeyDictionary()

    def state(self, layer: Any, like: Any, rows: int, num_tokens: int, mask: Tensor | None) -> State:
        """The state of a layer of a cache, which may be written, with room for these tokens.

        like: of one row, as the program makes it. mask (b, past): which of the tokens so far count; None: all.
        """
        given = self._given.get(layer)
        if given is not None and _same(given, tensors_of(layer), mask):
            state = given.state
            if not isinstance(state, KVCache) and rows > 1:
                state.tokens.copy_(layer.conv_states[0][:, :, 1:].mT)
        elif not tensors_of(layer):
            state = new_state(like, rows, num_tokens)
        else:
            state = _read(layer, like, mask)
        return state.with_room(num_tokens) if isinstance(state, KVCache) else state

    def give(self, layer: Any, state: Any, mask: Tensor | None) -> None:
        """Let a layer of a cache hold views of a state. mask (b, length): which tokens count."""
        given = self._given.get(layer)
        if isinstance(layer, DynamicLayer):
            hold_keys(layer, *state.used()[:2])
        elif given is None or given.state is not state:
            state = _hold(layer, state)
        else:  # the layer holds its sums, and of one row its last inputs
            if len(state.tokens) > 1:
                layer.conv_states[0][:, :, 1:].copy_(state.tokens.mT)
            self._given[layer] = given._replace(mask=mask)
            return
        self._given[layer] = Given(state, tensors_of(layer), mask)


def new_state(like: Any, rows: int, num_tokens: int) -> State:
    """Make the state before the first token, with room for these. like: of one row, as the program makes it."""
    if isinstance(like, KVCache):
        capacity = max(SMALLEST_CACHE, num_tokens)
        return KVCache.empty(rows, like.k.shape[1], capacity, like.k.shape[3], like.v.shape[3], dtype=torch.float32)
    return cast(State, like.map(lambda x: x.repeat_interleave(rows, 0)))


def tensors_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a cache's layer; none before the first token."""
    if isinstance(layer, DynamicLayer):
        return (cast(Tensor, layer.keys), cast(Tensor, layer.values)) if layer.is_initialized else ()
    if not layer.has_previous_state[0]:
        return ()
    return tuple(x for x in (layer.conv_states[0], layer.recurrent_states[0]) if x is not None)


def _same(given: Given, there: tuple[Tensor, ...], mask: Tensor | None) -> bool:
    """Whether a layer holds what it was given, and the same tokens count."""
    if len(there) != len(given.tensors) or any(a is not b or _is_frozen(a) for a, b in zip(there, given.tensors)):
        return False
    if mask is None or given.mask is None:
        return (mask is None or bool(mask.all())) and given.mask is None
    return torch.equal(mask, given.mask)


def _is_frozen(x: Tensor) -> bool:
    """Whether it was made in torch's inference mode, outside of which nothing writes it."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def _read(layer: Any, like: Any, mask: Tensor | None) -> State:
    """Copy what a layer of a cache holds."""
    if isinstance(layer, DynamicLayer):
        keys, values = tensors_of(layer)
        rows, heads, length, d = keys.shape
        state = KVCache.empty(rows, heads, length + SMALLEST_CACHE, d, values.shape[3], dtype=keys.dtype)
        return state.append(keys, values, None if mask is None or mask.all() else mask, inplace=True)
    inputs, *S = tensors_of(layer)
    fields = {"tokens": inputs[:, :, 1:].mT.clone(memory_format=torch.contiguous_format)}
    if S:
        x = S[0].mT if isinstance(like, Mamba2State) else S[0]
        fields["S"] = x.clone(memory_format=torch.contiguous_format)
    return cast(State, type(like)(**fields))


def _hold(layer: Any, state: Any) -> Any:
    """Let a layer of a cache hold a state's sums and last inputs; return the state, whose inputs of one row lie there, too.

    The first of the w inputs is one that no filter sees any more: it is zero.
    """
    tokens, inputs = state.tokens, layer.conv_states[0]
    rows, past, channels = tokens.shape
    shared = rows == 1 and inputs is not None and tokens.data_ptr() == inputs[:, :, 1:].data_ptr()
    if not shared:
        if rows == 1 or not layer.has_previous_state[0] or _is_frozen(inputs):
            inputs = layer.conv_states[0] = tokens.new_zeros(rows, past + 1, channels).mT
        inputs[:, :, 1:].copy_(tokens.mT)
        if rows == 1:
            state = replace(state, tokens=inputs.mT[:, 1:])
    layer.conv_kernel_size[0] = past + 1
    layer.dtype, layer.device = tokens.dtype, tokens.device
    begun = [layer.has_previous_state, layer.is_conv_states_initialized]
    if hasattr(state, "S"):
        layer.recurrent_states[0] = state.S.mT if isinstance(state, Mamba2State) else state.S
        begun.append(layer.is_recurrent_states_initialized)
    for x in begun:
        x[0] = True
    return state
