"""The layers of a transformers cache for blocks with a convolution: its state, and that of attention."""

from typing import Any, ClassVar, cast

from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from tarnn.huggingface.cache import LinearStateLayer, SoftmaxStateLayer, StateLayer


class ConvolvedLayer(CacheLayerMixin):
    """Two layers as one, since transformers makes one for each layer of a model. What it is asked to do, both do."""

    is_compileable = False
    supports_early_init = False
    attention: ClassVar[type[StateLayer]]

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        self.parts = (LinearStateLayer(max_cache_len, **kwargs), self.attention(max_cache_len, **kwargs))
        self.max_cache_len = max_cache_len
        super().__init__()

    @property
    def is_initialized(self) -> bool:
        return self.parts[1].is_initialized

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        for part in self.parts:
            part.is_initialized = value

    def activate_past_recording(self) -> None:
        for part in self.parts:
            if isinstance(part, LinearStateLayer):  # others can be cropped anyway
                part.activate_past_recording()

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return all(part.is_croppable for part in self.parts)

    def check_crop(self, tokens_to_remove: int) -> None:
        for part in self.parts:
            if isinstance(part, LinearStateLayer):
                part.check_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        for part in cast(Any, self.parts):
            part.crop(tokens_to_remove)

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for part in self.parts:
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for part in self.parts:
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for part in self.parts:
            part.batch_select_indices(indices)

    def get_seq_length(self) -> int:
        return self.parts[1].get_seq_length()

    def get_max_length(self) -> int:
        return self.parts[1].get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.parts[1].get_mask_sizes(query_length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.parts[1].lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.parts[1].update(key_states, value_states)


class ConvolvedLinearLayer(ConvolvedLayer):
    """Behind a convolution, a recurrent state."""

    _layer_type = "tarnn_linear_convolved"
    attention = LinearStateLayer


class ConvolvedSoftmaxLayer(ConvolvedLayer):
    """Behind a convolution, a `KVCache`."""

    _layer_type = "tarnn_softmax_convolved"
    attention = SoftmaxStateLayer


STATIC_LAYER_TYPE_MAPPING.update({x._layer_type: x for x in (ConvolvedLinearLayer, ConvolvedSoftmaxLayer)})
