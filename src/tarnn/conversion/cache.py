"""A cache of constant size for models of transformers that run `tarnn_hybrid`: generation in constant memory."""

import warnings
import weakref
from typing import Any, cast

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from tarnn.conversion.layer import HeadStates
from tarnn.conversion.options import converted_layers
from tarnn.huggingface.cache import LinearStateLayer
from tarnn.huggingface.past import check_crop_of
from tarnn.ops.softmax.state import KVCache


class HybridCacheLayer(LinearStateLayer):
    """One layer's `HybridState`.

    transformers hands new keys to `update`, and the keys that it returns to the attention function. So `update` returns the
    new keys alone, marked with this layer: there the attention function finds the state, and leaves the next one.
    """

    _layer_type = None  # type: ignore[assignment]  # or it would be made for layers of our own models
    owner: weakref.ref | None = None

    def claim(self, module: nn.Module) -> None:
        """Make this module the owner of the cache layer. Raises ValueError if another module owns it."""
        if self.owner is None:
            self.owner = weakref.ref(module)
        if self.owner() is not module:
            raise ValueError(
                "this cache was begun by another model; give each model a cache of its own (constant_cache), or a file of "
                "its own (load_cache)."
            )

    def own(self, num_tokens: int) -> HeadStates:
        state = super().own(num_tokens)
        assert isinstance(state, HeadStates)
        if not state.grows:
            return state
        parts = (x.with_room(num_tokens) if isinstance(x, KVCache) else x for x in state.parts)
        return HeadStates(tuple(parts))

    def reset(self) -> None:
        super().reset()
        self.owner = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.num_tokens += key_states.shape[2]
        key_states.tarnn_cache_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True


class ConstantCache(Cache):
    """The cache of `constant_cache`: all its layers hold the same number of rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        layer, rows = cast(Any, self.layers[layer_idx]), len(key_states)
        if isinstance(layer, HybridCacheLayer):
            held = rows if layer.state is None else layer.state.batch_size
        else:
            held = len(layer.keys) if layer.is_initialized else rows
        if held != rows:
            raise ValueError(
                f"this cache holds {held} sequences, and the batch has {rows}; begin a new one (constant_cache), or take rows "
                "of this one (batch_select_indices, batch_repeat_interleave)."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        check_crop_of(self, tokens_to_remove)
        super().crop(tokens_to_remove)


def constant_cache(model: PreTrainedModel) -> Cache:
    """A cache of constant size for `model.generate(…, cache=constant_cache(model))`.

    The model runs attn_implementation="tarnn_hybrid" or "tarnn_linear". Its own sliding-window layers keep their window.
    Heads of mode "exact" keep all keys, so their layers grow: a warning names them.
    Raises ValueError for a model that runs something else.
    """
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if not str(name).startswith("tarnn_"):
        raise ValueError(
            f"this model runs {name!r} attention, which needs a growing cache; call "
            'model.set_attn_implementation("tarnn_hybrid") first.'
        )
    warn_of_growth(model, sliding_layers(model)[0])
    return make_cache(model)


def make_cache(model: PreTrainedModel) -> ConstantCache:
    """A cache for a model that is known to run this attention."""
    sliding, window = sliding_layers(model)
    return ConstantCache(
        [DynamicSlidingWindowLayer(sliding_window=window) if x else HybridCacheLayer() for x in sliding]
    )


def sliding_layers(model: PreTrainedModel) -> tuple[list[bool], Any]:
    """Which layers keep the model's own sliding window, and how wide that is."""
    config = model.config.get_text_config(decoder=True)
    kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window: Any = getattr(config, "sliding_window", None)
    if "layer_types" not in config.to_dict() and window is not None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds], window


def warn_of_growth(model: PreTrainedModel, sliding: list[bool]) -> None:
    """Warn of layers that keep all keys of some head, by their numbers."""
    layers = converted_layers(model).items()
    growing = [str(i) for i, layer in layers if layer.grows and not any(sliding[i : i + 1])]
    if growing:
        what = f"layer {growing[0]} keeps" if len(growing) == 1 else f"layers {', '.join(growing)} keep"
        warnings.warn(
            f'{what} all keys of heads of mode "exact": this cache grows with the sequence there.', stacklevel=3
        )
