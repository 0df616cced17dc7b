"""The layers of a transformers cache that hold a tarnn state: what `generate` carries from token to token."""

from abc import abstractmethod

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from tarnn.ops import KVCache, State


class StateLayer(CacheLayerMixin):
    """One layer's state in a transformers `Cache`; the model reads it with `take` and writes it with `write`.

    `state` is what the layer's attention makes of a sequence, None before the first token. `get_seq_length`
    counts the tokens, padding included, since that is what transformers measures its masks with.
    """

    is_compileable = False  # what compiles is TarnnForCausalLM.step
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len
        self.state: State | None = None
        self.num_tokens = 0

    @abstractmethod
    def take(self, attention, x: Tensor) -> State:
        """The state, ready for the tokens x (b, t, hidden); a fresh one at the start of a sequence."""

    def write(self, state: State, num_tokens: int) -> None:
        """Takes in the state after `num_tokens` more."""
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
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._pick(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a state can't forget its last tokens, so this cache can't be cropped (assisted decoding "
                "needs that). To go back to an earlier place, keep a copy of the state from there."
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} holds a state, not keys and values; TarnnModel starts it.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise TypeError(f"{type(self).__name__} holds a state, not keys and values; TarnnModel writes it.")

    def _pick(self, index: Tensor) -> None:
        """Keeps the rows of the batch that `index` names, in its order."""
        if self.state is not None:
            self.state = self.state.select(index)


class LinearStateLayer(StateLayer):
    """A recurrent state: of constant size, however long the sequence. `NoState` for a layer without attention."""

    _layer_type = "tarnn_linear"

    def take(self, attention, x: Tensor) -> State:
        if self.state is None:
            return attention.new_state(x.shape[0], dtype=x.dtype, device=x.device)
        return self.state


class SoftmaxStateLayer(StateLayer):
    """A `KVCache`: as large as a StaticCache asks for, or doubled when full, so that appending is O(1)."""

    _layer_type = "tarnn_softmax"

    def take(self, attention, x: Tensor) -> KVCache:
        if not isinstance(self.state, KVCache):
            capacity = self.max_cache_len or max(64, x.shape[1])
            return attention.new_state(x.shape[0], capacity=capacity, device=x.device)
        needed = self.state.length + x.shape[1]
        if self.max_cache_len is None and needed > self.state.capacity:
            self.state = _grown(self.state, max(needed, 2 * self.state.capacity))
        return self.state

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len


def _grown(old: KVCache, capacity: int) -> KVCache:
    (b, g, n, d), e = old.k[:, :, : old.length].shape, old.v.shape[-1]
    new = KVCache.empty(b, g, capacity, d, e, dtype=old.k.dtype, device=old.k.device)
    new.append(old.k[:, :, :n], old.v[:, :, :n], None if old.mask is None else old.mask[:, :n])
    return new


# Importing this has registered both kinds for dynamic caches; they serve static ones as well.
STATIC_LAYER_TYPE_MAPPING.update(
    {layer._layer_type: layer for layer in (LinearStateLayer, SoftmaxStateLayer)}
)
