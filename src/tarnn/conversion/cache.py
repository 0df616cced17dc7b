"""A cache of constant size for models of transformers that run `tarnn_hybrid`: generation in constant memory."""

import warnings
import weakref
from typing import Any, cast

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tarnn.conversion.layer import HeadStates
from tarnn.conversion.options import attention_layers, converted_layers
from tarnn.huggingface.cache import LinearStateLayer
from tarnn.huggingface.rewind import check_crop_of
from tarnn.ops.softmax.cache import KVCache

OWN_CACHE = ("minimax",)  # models whose forward refuses any other


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

    def writable_state(self, num_tokens: int) -> HeadStates:
        state = super().writable_state(num_tokens)
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


class ConstantCache(DynamicCache):
    """The cache of `constant_cache`: transformers' own, but for layers that would keep all keys. Each holds as many rows."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(config=model.config)
        self.layers = [HybridCacheLayer() if type(x) is DynamicLayer else x for x in self.layers]

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


def constant_cache(model: PreTrainedModel) -> ConstantCache:
    """A cache of constant size for `model.generate(…, cache=constant_cache(model))`.

    The model runs attn_implementation="tarnn_hybrid" or "tarnn_linear". Its own sliding-window and linear layers keep what
    transformers keeps for them. Heads of mode "exact" keep all keys, so their layers grow: a warning names them.
    Raises ValueError for a model that runs something else, or whose cache can't be of constant size.
    """
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if not str(name).startswith("tarnn_"):
        raise ValueError(
            f"this model runs {name!r} attention, which needs a growing cache; call "
            'model.set_attn_implementation("tarnn_hybrid") first.'
        )
    check_cache(model)
    cache = ConstantCache(model)
    warn_of_growth(model, cache)
    return cache


def check_cache(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that has no cache of constant size, whatever its attention computes."""
    if model.config.model_type in OWN_CACHE:
        raise ValueError(
            f"{type(model).__name__} keeps its linear layers' states in a cache of its own, so converting it would not make its "
            "cache constant; patch_transformers() computes it as it is."
        )
    layers: list[Any] = ConstantCache(model).layers
    if twofold := [i for i, x in enumerate(layers) if isinstance(x, DynamicLayer) and hasattr(x, "recurrent_states")]:
        raise ValueError(
            f"layer {twofold[0]} of {type(model).__name__} keeps all keys beside a recurrent state, so converting it would "
            "not make its cache constant; patch_transformers() computes it as it is."
        )


def warn_of_growth(model: PreTrainedModel, cache: ConstantCache) -> None:
    """Warn of layers that keep all keys of some head, by their numbers."""
    modules, kinds = attention_layers(model), dict(enumerate(cache.layers))
    places = [getattr(modules[i], "layer_idx", i) for i, layer in converted_layers(model).items() if layer.grows]
    growing = [str(i) for i in places if isinstance(kinds.get(i), HybridCacheLayer)]
    if growing:
        what = f"layer {growing[0]} keeps" if len(growing) == 1 else f"layers {', '.join(growing)} keep"
        warnings.warn(
            f'{what} all keys of heads of mode "exact": this cache grows with the sequence there.', stacklevel=3
        )
