"""A constant cache in a file: a converted model reads a long text once, and continues from it many times.

The format is `data/tensor_file.py`, as for tarnn's own models. Tensors: `tokens` (layers,), how many each layer has seen,
padding included, and for layer i `layers.i.parts.j.…`, the fields of the states of its heads, or `layers.i.keys`,
`.values` where a layer keeps the model's own sliding window.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tarnn.conversion.cache import HybridCacheLayer, constant_cache
from tarnn.conversion.layer import HeadStates
from tarnn.data.tensor_file import fields_of, fingerprint_of, load, save
from tarnn.errors import UserError
from tarnn.ops.softmax.cache import KVCache
from tarnn.ops.states import HybridState

NOT_THE_FUNCTION = {
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "dtype",
    "use_cache",
    "architectures",
}


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over all weights, the attention that runs, and the config, except keys that don't change the function."""
    config = {key: x for key, x in model.config.to_dict().items() if key not in NOT_THE_FUNCTION}
    return fingerprint_of(model.state_dict(), config | {"attention": model.config._attn_implementation})


def save_cache(path: str | Path, model: PreTrainedModel, cache: Cache) -> int:
    """Write a cache of `constant_cache(model)`; return the file's size in bytes.

    Atomic: a file that was there stays until the new one is complete. Raises UserError where it can't be written.
    """
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if hasattr(layer, "recurrent_states"):
            raise UserError(
                f"layer {i} of this cache is a {type(layer).__name__} of transformers, which the format has no place for; caches "
                "of models whose layers all are attention can be saved."
            )
    tensors = {"tokens": torch.tensor([layer.get_seq_length() for layer in layers])}
    for i, layer in enumerate(layers):
        tensors |= {f"layers.{i}.{name}": x for name, x in tensors_of(layer).items()}
    return save(path, tensors, fingerprint(model), what="cache")


def load_cache(path: str | Path, model: PreTrainedModel) -> Cache:
    """Read what `save_cache` wrote, onto the model's device.

    Raises UserError (a ValueError) for a file that is missing, cut short, no cache, changed since it was written, of
    another version of the format or of another model.
    """
    tensors = load(path, fingerprint(model), what="cache", writer="tarnn.conversion.save_cache").tensors
    cache = constant_cache(model)
    for i, (layer, seen) in enumerate(zip(cache.layers, tensors["tokens"].tolist(), strict=True)):
        fields = {name: x.to(model.device) for name, x in fields_of(tensors, f"layers.{i}.").items()}
        if fields:
            fill(layer, fields, seen)
    return cache


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of one cache layer; none before its first token."""
    if isinstance(layer, HybridCacheLayer):
        return {} if layer.state is None else layer.state.tensors()
    return {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}


def fill(layer: Any, fields: dict[str, Tensor], seen: int) -> None:
    """The inverse of `tensors_of`, for a layer that has seen nothing."""
    if not isinstance(layer, HybridCacheLayer):
        layer.lazy_initialization(fields["keys"], fields["values"])
        layer.keys, layer.values, layer.cumulative_length = fields["keys"], fields["values"], seen
        return
    parts: list[HybridState | KVCache] = []
    while part := fields_of(fields, f"parts.{len(parts)}."):
        hybrid = "count" in part
        parts.append(
            HybridState(**part) if hybrid else KVCache(part["k"], part["v"], part["k"].shape[2], part.get("mask"))
        )
    layer.state, layer.num_tokens, layer.is_initialized = HeadStates(tuple(parts)), seen, True
