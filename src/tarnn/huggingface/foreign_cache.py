"""Map the layers of transformers' caches to states of a program and back: views where the layouts agree, else copies.

    layer of a cache                                   state of a program
    keys, values (b, g, t, d)                          KVCache: the same memory, with room behind it; of float16 a copy
    recurrent_states (b, h, k, v)                      S or h, the same memory, float32; of Mamba and Mamba-2 transposed
    conv_states (b, c, w), the last w inputs           tokens (b, w − 1, c), float32: the filters see no more

`forward` of a model may go on with such a layer at any token. Whether it, or anybody else, did is seen by whether the layer
still holds these very tensors; what `forward` writes into them, it writes into the state. What a layer has in 16 bits is a
rounded copy of the state's inputs, which keep their digits until somebody writes others.
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
from tarnn.ops.states import FilteredScanState

SMALLEST_CACHE = 64  # keys for which a softmax layer's cache has room at least


class Given(NamedTuple):
    """A state that a layer holds, the layer's views of it, and which tokens count; None: all.

    narrow: its keys and values in float16, which kernels don't read; None where the layer has views of the state's own.
    """

    state: Any
    tensors: tuple[Tensor, ...]
    mask: Tensor | None
    narrow: KVCache | None = None


class ForeignLayers:
    """The layers of transformers' caches that one model has written."""

    def __init__(self) -> None:
        self._given: WeakKeyDictionary[Any, Given] = WeakKeyDictionary()

    def state(
        self, layer: Any, like: Any, rows: int, num_tokens: int, mask: Tensor | None, dtype: torch.dtype
    ) -> State:
        """The state of a layer of a cache, which may be written, with room for these tokens.

        like: of one row, as the program makes it. mask (b, past): which of the tokens so far count; None: all. dtype: of
        the model.
        """
        given = self._given.get(layer)
        if given is not None and _same(given, layer, mask):
            state = given.state
            if not isinstance(state, KVCache) and not _shares_inputs(layer, state):
                inputs = layer.conv_states[0][:, :, 1:].mT
                if not torch.equal(inputs, state.tokens.to(inputs.dtype)):  # `forward` went on
                    state.tokens.copy_(inputs)
        elif not tensors_of(layer):
            state = new_state(like, rows, num_tokens, dtype)
        else:
            state = _read(layer, like, mask)
        return state.with_room(num_tokens) if isinstance(state, KVCache) else state

    def give(self, layer: Any, state: Any, mask: Tensor | None, dtype: torch.dtype) -> None:
        """Let a layer of a cache hold views of a state. mask (b, length): which tokens count. dtype: the model's."""
        given, narrow = self._given.get(layer), None
        if isinstance(layer, DynamicLayer):
            if dtype == torch.float16:
                narrow = _narrowed(state, given if given is not None and _holds(given, layer) else None)
            hold_keys(layer, *(narrow or state).used()[:2])
        elif given is None or given.state is not state:
            state = _hold(layer, state, dtype)
        else:  # the layer holds its sums, and of one row its last inputs
            if not _shares_inputs(layer, state):
                layer.conv_states[0][:, :, 1:].copy_(state.tokens.mT)
            self._given[layer] = given._replace(mask=mask)
            return
        self._given[layer] = Given(state, tensors_of(layer), mask, narrow)


def new_state(like: Any, rows: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> State:
    """Make the state before the first token, with room for these. like: of one row, as the program makes it.

    dtype: the model's, which keys and values have too, but for float16, which kernels don't read.
    """
    if isinstance(like, KVCache):
        capacity, kept = max(SMALLEST_CACHE, num_tokens), _kept_as(dtype)
        return KVCache.empty(rows, like.k.shape[1], capacity, like.k.shape[3], like.v.shape[3], dtype=kept)
    return cast(State, like.map(lambda x: x.repeat_interleave(rows, 0)))


def _kept_as(dtype: torch.dtype) -> torch.dtype:
    """Return in which type the step keeps keys and values of a model of this one."""
    return torch.float32 if dtype == torch.float16 else dtype


def _narrowed(state: KVCache, given: Given | None) -> KVCache:
    """Return keys and values in float16, of which those that the layer was given before are there already."""
    narrow = None if given is None else given.narrow
    if narrow is None or narrow.length > state.length:
        (b, g, _, d), e = state.k.shape, state.v.shape[3]
        narrow = KVCache.empty(b, g, state.capacity, d, e, dtype=torch.float16)
    new = slice(narrow.length, state.length)
    narrow = narrow.with_room(state.length - narrow.length)
    return narrow.append(state.k[:, :, new], state.v[:, :, new], inplace=True)


def tensors_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a cache's layer; none before the first token."""
    if isinstance(layer, DynamicLayer):
        return (cast(Tensor, layer.keys), cast(Tensor, layer.values)) if layer.is_initialized else ()
    if not layer.has_previous_state[0]:
        return ()
    return tuple(x for x in (layer.conv_states[0], layer.recurrent_states[0]) if x is not None)


def _same(given: Given, layer: Any, mask: Tensor | None) -> bool:
    """Whether a layer holds what it was given, and the same tokens count."""
    if not _holds(given, layer):
        return False
    if mask is None or given.mask is None:
        return (mask is None or bool(mask.all())) and given.mask is None
    return torch.equal(mask, given.mask)


def _holds(given: Given, layer: Any) -> bool:
    """Whether a layer still holds the very tensors that it was given."""
    there = tensors_of(layer)
    return len(there) == len(given.tensors) and all(a is b and not _is_frozen(a) for a, b in zip(there, given.tensors))


def _shares_inputs(layer: Any, state: Any) -> bool:
    """Whether the last inputs of a state lie where the layer has them."""
    return bool(state.tokens.data_ptr() == layer.conv_states[0][:, :, 1:].data_ptr())


def _is_frozen(x: Tensor) -> bool:
    """Whether it was made in torch's inference mode, outside of which nothing writes it."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def _read(layer: Any, like: Any, mask: Tensor | None) -> State:
    """Copy what a layer of a cache holds."""
    if isinstance(layer, DynamicLayer):
        keys, values = tensors_of(layer)
        rows, heads, length, d = keys.shape
        dtype = _kept_as(keys.dtype)
        state = KVCache.empty(rows, heads, length + SMALLEST_CACHE, d, values.shape[3], dtype=dtype)
        mask = None if mask is None or mask.all() else mask
        return state.append(keys.to(dtype), values.to(dtype), mask, inplace=True)
    inputs, *S = tensors_of(layer)
    fields = {"tokens": _copy_of(inputs[:, :, 1:].mT)}
    if S:
        fields["h" if hasattr(like, "h") else "S"] = _copy_of(_turned(S[0], like))
    return cast(State, type(like)(**fields))


def _turned(x: Tensor, like: Any) -> Tensor:
    """Return sums of a layer as a state of this kind has them, or back."""
    return x.mT if isinstance(like, Mamba2State | FilteredScanState) and x.ndim > 2 else x


def _copy_of(x: Tensor) -> Tensor:
    """Copy numbers of a layer as a state has them."""
    return x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _hold(layer: Any, state: Any, dtype: torch.dtype) -> Any:
    """Let a layer of a cache hold a state's sums and last inputs; return the state, whose inputs of one row lie there, too, if
    the model is float32.

    The first of the w inputs is one that no filter sees any more: it is zero.
    """
    tokens, inputs = state.tokens, layer.conv_states[0]
    rows, past, channels = tokens.shape
    alone = rows == 1 and tokens.dtype == dtype
    if not (alone and inputs is not None and _shares_inputs(layer, state)):
        if alone or not layer.has_previous_state[0] or _is_frozen(inputs) or inputs.dtype != dtype:
            inputs = layer.conv_states[0] = tokens.new_zeros(rows, past + 1, channels, dtype=dtype).mT
        inputs[:, :, 1:].copy_(tokens.mT)
        if alone:
            state = replace(state, tokens=inputs.mT[:, 1:])
    layer.conv_kernel_size[0] = past + 1
    layer.dtype, layer.device = inputs.dtype, tokens.device
    begun = [layer.has_previous_state, layer.is_conv_states_initialized]
    if (sums := getattr(state, "S", getattr(state, "h", None))) is not None:
        layer.recurrent_states[0] = _turned(sums, state)
        begun.append(layer.is_recurrent_states_initialized)
    for x in begun:
        x[0] = True
    return state
