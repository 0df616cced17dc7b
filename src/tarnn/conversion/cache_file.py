"""A constant cache in a file: a converted model reads a book once, and goes on from it many times.

The file is safetensors, as our own models' state files are (`decoding/state_file.py`). Tensors: `tokens` (layers,), how
many each layer has seen, padding included, and for layer i `layers.i.parts.j.…`, the fields of the states of its heads, or
`layers.i.keys`, `.values` where a layer keeps the model's own sliding window. Metadata: what it is, its version, the
fingerprint of the model with its options, and a checksum over all of these. In files of version 1 sums have one maximum M per
head for all maps; they are read too.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tarnn._version import __version__
from tarnn.conversion.cache import HybridCacheLayer, constant_cache
from tarnn.conversion.layer import HeadStates
from tarnn.conversion.options import attention_layers, child_of
from tarnn.data.tensor_file import add_tensors, checksum, fields_of, read_safetensors, write_atomically
from tarnn.errors import UserError
from tarnn.ops.hybrid.state import HybridState
from tarnn.ops.softmax.op import KVCache

FORMAT, VERSION, FIRST_VERSION = "tarnn.cache", "2", "1"
NOT_THE_FUNCTION = {
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "dtype",
    "use_cache",
    "architectures",
}


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the config, less what doesn't change the function, the attention that runs, and all weights."""
    config = {key: x for key, x in model.config.to_dict().items() if key not in NOT_THE_FUNCTION}
    config["attention"] = model.config._attn_implementation
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    return add_tensors(digest, model.state_dict()).hexdigest()


def save_cache(path: str | Path, model: PreTrainedModel, cache: Cache) -> int:
    """Writes a cache of `constant_cache(model)`; returns the file's size in bytes.

    Atomic: a file that was there stays until the new one is complete. Raises UserError where it can't be written.
    """
    layers: list[Any] = cache.layers
    tensors = {"tokens": torch.tensor([layer.get_seq_length() for layer in layers])}
    for i, layer in enumerate(layers):
        tensors |= {f"layers.{i}.{name}": x for name, x in tensors_of(layer).items()}
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    metadata = {
        "format": FORMAT,
        "format_version": VERSION,
        "tarnn_version": __version__,
        "fingerprint": fingerprint(model),
    }
    data = save(tensors, metadata | {"checksum": checksum(tensors, metadata)})
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"the cache ({len(data):,} bytes) can't be written to {path}: {error.strerror}. Make room, or give another place."
        ) from error
    return len(data)


def load_cache(path: str | Path, model: PreTrainedModel) -> Cache:
    """The cache that `save_cache` wrote, on the model's device.

    Raises UserError (a ValueError) for a file that is missing, cut short, no cache, changed since it was written, of
    another version, or of another model.
    """
    again = "Make it again with tarnn.conversion.save_cache."
    tensors, metadata = read_safetensors(path, "cache", again)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a saved cache. {again}")
    version = metadata.get("format_version")
    if version not in (FIRST_VERSION, VERSION):
        raise UserError(
            f"{path} has version {version} of the cache format; this tarnn reads versions {FIRST_VERSION} and {VERSION}. {again}"
        )
    if metadata.get("checksum") != checksum(tensors, metadata):
        raise UserError(f"{path} is damaged: its checksum is not that of its contents. {again}")
    if metadata.get("fingerprint") != fingerprint(model):
        raise UserError(
            f"{path} was saved by another model: other weights, another config or other options of attention. Give the "
            f"checkpoint that made it, or make the cache again with this one."
        )
    cache = constant_cache(model)
    for i, (layer, seen) in enumerate(zip(cache.layers, tensors["tokens"].tolist(), strict=True)):
        found = {name: x.to(model.device) for name, x in fields_of(tensors, f"layers.{i}.").items()}
        if found:
            fill(layer, found, seen)
    if version == FIRST_VERSION:
        for layer, attention in zip(cache.layers, attention_layers(model), strict=True):
            if isinstance(layer, HybridCacheLayer) and layer.state is not None:
                layer.state = with_maxima(layer.state, child_of(attention))
    return cache


def with_maxima(state: Any, attention: Any) -> Any:
    """A layer's state from a file of version 1: with one M per feature where the layer's map needs that."""
    phi, parts = attention.feature_map, list(state.parts)
    if phi is None or not phi.log_features:
        return state
    parts[0] = replace(parts[0], M=parts[0].M[..., None].expand_as(parts[0].z).contiguous())
    return HeadStates(tuple(parts))


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """What a layer of a cache holds; nothing before its first token."""
    if isinstance(layer, HybridCacheLayer):
        return {} if layer.state is None else layer.state.tensors()
    return {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}


def fill(layer: Any, found: dict[str, Tensor], seen: int) -> None:
    """The contrary of `tensors_of`, for a layer that has seen nothing."""
    if not isinstance(layer, HybridCacheLayer):
        layer.lazy_initialization(found["keys"], found["values"])
        layer.keys, layer.values, layer.cumulative_length = found["keys"], found["values"], seen
        return
    parts: list[HybridState | KVCache] = []
    while part := fields_of(found, f"parts.{len(parts)}."):
        hybrid = "count" in part
        parts.append(
            HybridState(**part) if hybrid else KVCache(part["k"], part["v"], part["k"].shape[2], part.get("mask"))
        )
    layer.state, layer.num_tokens, layer.is_initialized = HeadStates(tuple(parts)), seen, True
