"""A converted model as the token loop runs it: a prompt in pieces, then token by token, in constant memory."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from tarnn.conversion.cache import HybridCacheLayer, constant_cache
from tarnn.conversion.opening import open_pretrained
from tarnn.conversion.options import converted_layers
from tarnn.conversion.rows import calibrated_length
from tarnn.decoding.fused import refusal
from tarnn.errors import UserError
from tarnn.huggingface.versions import CACHE
from tarnn.huggingface.why_not_fused import why_not_fused


@dataclass(frozen=True)
class CacheState:
    """A constant cache with the methods of a model's state that the loop calls."""

    cache: Cache
    position: Tensor  # (b,)

    def clone(self) -> "CacheState":
        return CacheState(copy.deepcopy(self.cache), self.position.clone())

    def select(self, rows: Tensor) -> "CacheState":
        """Rows by their numbers; a number may come several times."""
        chosen = self.clone()
        chosen.cache.reorder_cache(cast(Any, rows))
        return CacheState(chosen.cache, chosen.position[rows])

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.cache.layers for x in held_by(layer))


def held_by(layer: Any) -> Iterator[Any]:
    """Yield the contents of a cache's layer: its state, or the tensors of transformers' own layer."""
    if isinstance(layer, HybridCacheLayer):
        yield from () if layer.state is None else (layer.state,)
        return
    for value in vars(layer).values():  # keys and values; of linear layers a dict of tensors by number
        yield from (x for x in (value.values() if isinstance(value, dict) else (value,)) if isinstance(x, Tensor))


class ConvertedText(nn.Module):
    """A converted causal language model: `prefill` and `step` as `TextModel` has them, on a cache of constant size."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.dtype, self.device = model.dtype, model.device
        config = model.config
        self.config = SimpleNamespace(
            vocab_size=config.vocab_size, max_position_embeddings=getattr(config, "max_position_embeddings", None)
        )
        self.pad_id = getattr(config, "pad_token_id", None) or 0
        ends = model.generation_config.eos_token_id
        self.end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def new_state(self, batch_size: int, capacity: int = 0) -> Any:
        """The state before the first token, which grows if it does, whatever the capacity."""
        position = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        return CacheState(constant_cache(self.model), position)

    @torch.no_grad()
    def prefill(self, ids: Tensor, state: Any, *, inplace: bool = False) -> tuple[Tensor, Any]:
        """ids (b, t) → logits (b, v) of the next token, and the state after these."""
        state = state if inplace else state.clone()
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: state.cache}).logits[:, -1]
        return logits, CacheState(state.cache, state.position + ids.shape[1])

    def step(self, ids: Tensor, state: Any, *, inplace: bool = False) -> tuple[Tensor, Any]:
        """ids (b,) → the same."""
        return self.prefill(ids[:, None], state, inplace=inplace)

    @property
    def why(self) -> str:
        """Name what computes, with the reason why it is nothing faster."""
        return f"step by transformers, on a cache of constant size; no fused step: {why_not_fused(self.model)}"

    @property
    def about(self) -> str:
        """How far its attention reaches, in words."""
        modes = [mode for layer in converted_layers(self.model).values() for mode in layer.modes]
        counts = ", ".join(f"{modes.count(x)} {x}" for x in ("features", "window", "exact"))
        length = calibrated_length(self.model) if "features" in modes else None
        beyond = "" if length is None else f"; features calibrated on {length:,} tokens, window and sinks alone beyond"
        return f"converted, key/value heads: {counts}{beyond}"


def open_text(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device, weights: str | None = None
) -> ConvertedText:
    """The converted model in a folder, ready to continue a text; UserError for one that writes none.

    weights: how a fused step should keep them: UserError, with the reason why there is none.
    """
    model = open_pretrained(folder, converted=True)
    if not model.can_generate():
        raise UserError(
            f"{folder} holds a {type(model).__name__}, which reads whole texts and writes none: "
            "`tarnn predict` and `tarnn show` take it."
        )
    model = model.to(device) if dtype is None else model.to(device, dtype)
    for layer in converted_layers(model).values():
        layer.float()  # small, and 16 bits would lose what was calibrated
    model.eval()
    if weights is not None and (why := refusal(model)) is not None:
        raise UserError(f"--weights is not possible here: {why}. Leave --weights out.")
    return ConvertedText(model).eval()
