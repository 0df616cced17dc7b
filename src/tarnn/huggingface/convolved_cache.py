"""The layers of a transformers cache for blocks with a convolution: its state, and that of attention."""

from typing import Any, ClassVar

from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from tarnn.huggingface.cache import LinearStateLayer, SoftmaxStateLayer, StateLayer


def _of_both(name: str) -> Any:
    """Make a method that calls both parts' methods of this name."""

    def method(self: "ConvolvedLayer", *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    return method


def _of_attention(name: str) -> Any:
    """Make a method that calls the attention's method of this name."""
    return lambda self, *args, **kwargs: getattr(self.parts[1], name)(*args, **kwargs)


class ConvolvedLayer(CacheLayerMixin):
    """Two layers as one, since transformers makes one for each layer of a model."""

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

    crop = _of_both("crop")
    reset = _of_both("reset")
    reorder_cache = _of_both("reorder_cache")
    batch_repeat_interleave = _of_both("batch_repeat_interleave")
    batch_select_indices = _of_both("batch_select_indices")
    get_seq_length = _of_attention("get_seq_length")
    get_max_length = _of_attention("get_max_length")
    get_mask_sizes = _of_attention("get_mask_sizes")
    lazy_initialization = _of_attention("lazy_initialization")
    update = _of_attention("update")


class ConvolvedLinearLayer(ConvolvedLayer):
    """A convolution's state and a recurrent one."""

    _layer_type = "tarnn_linear_convolved"
    attention = LinearStateLayer


class ConvolvedSoftmaxLayer(ConvolvedLayer):
    """A convolution's state and a `KVCache`."""

    _layer_type = "tarnn_softmax_convolved"
    attention = SoftmaxStateLayer


STATIC_LAYER_TYPE_MAPPING.update({x._layer_type: x for x in (ConvolvedLinearLayer, ConvolvedSoftmaxLayer)})
