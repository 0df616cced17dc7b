"""The layers of a transformers cache that hold a tarnn state: what `generate` carries from token to token."""

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from tarnn.ops import KVCache, LinearState


class StateLayer(CacheLayerMixin):
    """One layer's state in a transformers `Cache`.

    `state` is what the layer's attention makes of a sequence; None before the first token. The model reads it
    with `take` and writes its successor with `write`. `get_seq_length` counts the tokens, padding included,
    since that is what transformers measures its masks with.
    """

    is_compileable = False  # our own step is what compiles, see TarnnForCausalLM.step

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.state: LinearState | KVCache | tuple | None = None
        self.num_tokens = 0
        self.max_cache_len = max_cache_len

    def take(self, attention, x: Tensor):
        """The state, ready for the tokens x (b, t, hidden); a fresh one at the start of a sequence."""
        if self.state is None:
            self.state = self._start(attention, x)
            self.is_initialized = True
        return self.state

    def write(self, state, num_tokens: int) -> None:
        """Takes in the state after `num_tokens` more."""
        self.state = state
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
        if self.state:
            rows = (self.state.k if isinstance(self.state, KVCache) else self.state[0]).shape[0]
            self._pick(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._pick(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a recurrent state can't forget its last tokens, so this cache can't be cropped (assisted decoding "
                "needs that); keep a copy of the state from before, or use a model with softmax attention."
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("this cache layer holds a state, not keys and values; TarnnModel starts it itself.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise TypeError("this cache layer holds a state, not keys and values; TarnnModel writes it itself.")

    def _start(self, attention, x: Tensor):
        raise NotImplementedError

    def _pick(self, index: Tensor) -> None:
        """Keeps the rows of the batch that `index` names, in its order."""
        if self.state:  # neither None nor the empty state of a layer without attention
            device = (self.state.k if isinstance(self.state, KVCache) else self.state[0]).device
            self.state = self.state.reorder(index.to(device))


class LinearStateLayer(StateLayer):
    """The state of a recurrent layer: of constant size, however long the sequence. `()` where there is no attention."""

    _layer_type = "tarnn_linear"

    def _start(self, attention, x: Tensor):
        return attention.new_state(x.shape[0], dtype=x.dtype, device=x.device)


class SoftmaxStateLayer(StateLayer):
    """A `KVCache`: as large as a StaticCache asks for, or doubled whenever it is full, so that appending is O(1)."""

    _layer_type = "tarnn_softmax"

    def take(self, attention, x: Tensor) -> KVCache:
        cache = super().take(attention, x)
        needed = cache.length + x.shape[1]
        if needed > cache.capacity and self.max_cache_len is None:
            self.state = cache = _grown(cache, max(needed, 2 * cache.capacity))
        return cache

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def _start(self, attention, x: Tensor) -> KVCache:
        capacity = self.max_cache_len or max(64, x.shape[1])
        return attention.new_state(x.shape[0], capacity=capacity, device=x.device)


def _grown(cache: KVCache, capacity: int) -> KVCache:
    new = KVCache.empty(
        *cache.k.shape[:2],
        capacity,
        cache.k.shape[-1],
        cache.v.shape[-1],
        dtype=cache.k.dtype,
        device=cache.k.device,
    )
    new.append(
        cache.k[:, :, : cache.length],
        cache.v[:, :, : cache.length],
        None if cache.mask is None else cache.mask[:, : cache.length],
    )
    return new


# Both kinds serve static caches as well: what is constant in size is static already.
STATIC_LAYER_TYPE_MAPPING.update(
    {layer._layer_type: layer for layer in (LinearStateLayer, SoftmaxStateLayer)}
)
