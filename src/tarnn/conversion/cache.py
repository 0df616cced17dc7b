"""A cache of constant size for models of transformers that run `tarnn_hybrid`: generation in constant memory."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from tarnn.ops.hybrid_chunks import HybridState


class HybridCacheLayer(CacheLayerMixin):
    """One layer's `HybridState`.

    transformers hands new keys to `update` and what comes back to the attention function. So `update` gives back the
    new keys alone, and marks them with this layer: there the attention function finds the state, and leaves the next.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: HybridState | None = None
        self.num_tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.num_tokens += key_states.shape[2]
        key_states.tarnn_cache_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def reset(self) -> None:
        self.state, self.num_tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self.state = self.state.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(len(self.state.count)).repeat_interleave(repeats)
            self.state = self.state.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a state of constant size can't forget its last tokens, so this cache can't be cropped (assisted "
                "decoding needs that). Generate without an assistant, or with a growing cache."
            )


def constant_cache(model: PreTrainedModel) -> Cache:
    """A cache of constant size for `model.generate(…, past_key_values=constant_cache(model))`.

    The model runs attn_implementation="tarnn_hybrid" or "tarnn_linear". Its own sliding-window layers keep their window.
    Raises ValueError for a model that runs something else.
    """
    config = model.config.get_text_config(decoder=True)
    name = config._attn_implementation
    if not str(name).startswith("tarnn_"):
        raise ValueError(
            f"this model runs {name!r} attention, which needs a growing cache; call "
            'model.set_attn_implementation("tarnn_hybrid") first.'
        )
    kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window: Any = getattr(config, "sliding_window", None)
    if "layer_types" not in config.to_dict() and window is not None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return Cache(
        layers=[
            DynamicSlidingWindowLayer(sliding_window=window)
            if kind == "sliding_attention"
            else HybridCacheLayer()
            for kind in kinds
        ]
    )
