"""The layers of a transformers cache that hold a tarnn state: what `generate` carries from token to token."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from tarnn.huggingface.rewind import Replay, Rewindable, check_crop
from tarnn.ops import KVCache, State


class StateLayer(CacheLayerMixin):
    """One layer's state in a transformers `Cache`: a value for the model, tensors to write into for the fused step.

        model.forward:   state_with_room(n) → attention → set(new state, n, replay)      values: nothing is overwritten
        the fused step:  set_first(state, n), once; then writable_state(n) → count(state, n)      the same tensors, in place

    `state` is None before the first token. `get_seq_length` counts the tokens, padding included, since that is what
    transformers measures its masks with.
    """

    is_compileable = False  # what compiles is TarnnForCausalLM.step
    supports_early_init = False

    @property
    def parts(self) -> tuple["StateLayer", ...]:
        """One for each state of a layer."""
        return (self,)

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len
        self.state = None
        self.num_tokens = 0

    @property
    def state(self) -> Any:
        return None if self._kind is None else self._kind(**self._parts)

    @state.setter
    def state(self, state: State | None) -> None:
        # kept as a dict, since transformers' exporter sets what it finds in objects, and a State is frozen
        self._kind: type | None = None if state is None else type(state)
        self._parts = {} if state is None else dict(vars(state))
        self._owned = False

    @property
    def writable(self) -> bool:
        """Whether this cache layer's state may be updated in place."""
        return True

    def writable_state(self, num_tokens: int) -> State:
        """Return the state, with room for `num_tokens` more, for a step that writes into its tensors.

        The first time it is a copy, since somebody may hold the state that was set here; later the same tensors.
        """
        if not self._owned:
            self.state = self.state.clone()
            self._owned = True
        return self.state

    def count(self, state: State, num_tokens: int) -> None:
        """Count `num_tokens` more, which a step has written into the tensors of `writable_state`."""
        self.num_tokens += num_tokens

    def set_first(self, state: State, num_tokens: int) -> None:
        """Store the state after the first tokens, whose tensors nobody else holds."""
        self.state, self.is_initialized, self.num_tokens = state, True, num_tokens
        self._owned = True

    def state_with_room(self, num_tokens: int) -> State | None:
        """Return the state, with room for `num_tokens` more."""
        return self.state

    def set(self, state: State, num_tokens: int, replay: Replay) -> None:
        """Store the state after `num_tokens` new tokens. replay(state, n) recomputes the state after the first n of them."""
        self.state, self.is_initialized = state, True
        self.num_tokens += num_tokens

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def reset(self) -> None:
        self.state, self.num_tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} holds a state, not keys and values; TarnnModel starts it.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise TypeError(f"{type(self).__name__} holds a state, not keys and values; TarnnModel writes it.")


class LinearStateLayer(StateLayer):
    """A recurrent state: of constant size, however long the sequence. `NoState` for a layer without attention.

    It can forget the last tokens (`crop`), as assisted decoding asks it to do with rejected candidates, of those that it
    read since `activate_past_recording` at least the last 64.
    """

    _layer_type = "tarnn_linear"

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__(max_cache_len, **kwargs)
        self.record_past = False
        self._past = Rewindable()

    @property
    def writable(self) -> bool:
        return not self.record_past

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.record_past

    def set(self, state: State, num_tokens: int, replay: Replay) -> None:
        if self.record_past:
            self.note(self.state, num_tokens, replay)
        super().set(state, num_tokens, replay)

    def note(self, state: State | None, num_tokens: int, replay: Replay) -> None:
        """Take note of tokens that are read on top of a state."""
        self._past.add(lambda: state, num_tokens, replay)

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` would remove. Raises ValueError for more than were recorded."""
        return check_crop(tokens_to_remove, self._past.num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        if remove := self.check_crop(tokens_to_remove):
            self.state = self._past.rewind(remove)
            self.num_tokens -= remove

    def reset(self) -> None:
        super().reset()
        self._past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._past.clear()  # which has other rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._past.clear()


class SoftmaxStateLayer(StateLayer):
    """A `KVCache`: as large as a StaticCache asks for, or doubled when full, so that appending is O(1)."""

    _layer_type = "tarnn_softmax"
    is_croppable = True

    def state_with_room(self, num_tokens: int) -> KVCache | None:
        state = self.state
        if state is not None and self.max_cache_len is None:
            state = self.state = state.with_room(num_tokens)
        return state

    def writable_state(self, num_tokens: int) -> KVCache:
        state = self.state_with_room(num_tokens)  # no copy: `forward` appends in place, too
        assert state is not None
        return state

    def count(self, state: State, num_tokens: int) -> None:
        super().count(state, num_tokens)
        self.state = state  # of another length

    def set(self, state: Any, num_tokens: int, replay: Replay) -> None:
        if self.max_cache_len is not None and state.capacity != self.max_cache_len:
            state = state.resized(self.max_cache_len)  # attention made one that is just large enough
        super().set(state, num_tokens, replay)

    def crop(self, tokens_to_remove: int) -> None:
        state = self.state
        if tokens_to_remove and state is not None:
            self.state = state.cropped(state.length + tokens_to_remove)
            self.num_tokens += tokens_to_remove

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len


# Importing this has registered both kinds for dynamic caches; they are for static ones as well.
STATIC_LAYER_TYPE_MAPPING.update({layer._layer_type: layer for layer in (LinearStateLayer, SoftmaxStateLayer)})
