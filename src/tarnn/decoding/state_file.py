"""A model's state in a file: read a book once, continue from it many times.

The file is safetensors. Tensors: `position` (b,), `logits` (b, vocab) of the token that comes next, `recent`
(the last few tokens, so that text can go on in the middle of a character), and for layer i `layers.i.S`, `.z`
(and `.M`) or, for a softmax layer, the filled part of its cache `layers.i.k`, `.v` (and `.mask`). Metadata:
what it is, its version, the fingerprint of the model that made it, the tokens seen, and since version 2 a
checksum over all of these. Until version 2, sums had one maximum M per head with every map; since version 3 with some maps
one per feature. Files of all versions are read; every field is held against the model.
"""

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from tarnn._version import __version__
from tarnn.data.tensor_file import add_tensors, checksum, fields_of, read_safetensors, write_atomically
from tarnn.errors import UserError
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.state import ModelState

FORMAT, VERSION = "tarnn.state", "3"
FIRST_VERSION, WITH_CHECKSUM = "1", "2"
AGAIN = "Make the state again with --state-out."
NOT_THE_FUNCTION = {"dropout"}
# the config's choices that came after version 1, and the values by which the function is that of a file without them
LATER = {"attention_options": {}, "causal": True, "input_size": None, "subsampling": 1}


def fingerprint(model: TextModel) -> str:
    """SHA-256 over the config, less what doesn't change the function, and all weights: name, shape, bits."""
    config = {x.name: getattr(model.config, x.name) for x in fields(ModelConfig) if x.name not in NOT_THE_FUNCTION}
    config = {k: value for k, value in config.items() if k not in LATER or value != LATER[k]}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    return add_tensors(digest, model.state_dict()).hexdigest()


class SavedState(NamedTuple):
    """What a state file holds, on the model's device."""

    state: ModelState
    logits: Float[Tensor, "b v"]
    recent: list[int]


def save_state(
    path: str | Path, model: TextModel, state: ModelState, logits: Float[Tensor, "b v"], recent: list[int]
) -> int:
    """Writes the state, the next token's logits and the last tokens; returns the file's size in bytes.

    Atomic, see `write_atomically`. Raises UserError where the file can't be written.
    """
    tensors = state.tensors() | {"logits": logits, "recent": torch.tensor(recent, dtype=torch.long)}
    metadata = {
        "format": FORMAT,
        "format_version": VERSION,
        "tarnn_version": __version__,
        "fingerprint": fingerprint(model),
        "tokens_seen": str(int(state.position.max())),
    }
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    data = save(tensors, metadata | {"checksum": checksum(tensors, metadata)})
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"the state ({len(data):,} bytes) can't be written to {path}: {error.strerror}. What was there "
            f"is as it was. Make room, or give another place."
        ) from error
    return len(data)


def load_state(path: str | Path, model: TextModel, *, room: int = 0) -> SavedState:
    """The state that `save_state` wrote. `room`: tokens that caches must still be able to hold.

    Raises UserError (a ValueError) for a file that is missing, cut short, no state, changed since it was written, of
    another version of the format or of another model.
    """
    tensors, metadata = read_safetensors(path, "state", f"`tarnn generate --state-out {path}` writes one.")
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} is a safetensors file, but not a saved state. `tarnn generate --state-out` writes one."
        )
    version = metadata.get("format_version")
    if version not in (FIRST_VERSION, WITH_CHECKSUM, VERSION):
        raise UserError(
            f"{path} has version {version} of the state format; this tarnn reads versions "
            f"{FIRST_VERSION} to {VERSION}. Make the state again with this tarnn."
        )
    if version != FIRST_VERSION and metadata.get("checksum") != checksum(tensors, metadata):
        raise UserError(f"{path} is damaged: its checksum is not that of its contents. {AGAIN}")
    if metadata.get("fingerprint") != fingerprint(model):
        raise UserError(
            f"{path} was saved by another model: other weights, another config or another dtype. Give the "
            f"checkpoint that made it, or make the state again with this one."
        )
    if version != VERSION:
        tensors = with_maxima(tensors, model)
    if wrong := wrong_field(tensors, metadata, model):
        raise UserError(f"{path} is no state of this model: {wrong}. {AGAIN}")
    device = next(model.parameters()).device
    tensors = {name: x.to(device) for name, x in tensors.items()}
    logits, recent, position = (tensors.pop(name) for name in ("logits", "recent", "position"))
    empty = model.new_state(len(position), cache_length(tensors) + room, cache_dtype(tensors, model))
    layers = (layer.filled(fields_of(tensors, f"layers.{i}.")) for i, layer in enumerate(empty.layers))
    return SavedState(ModelState(tuple(layers), position), logits, recent.tolist())


def with_maxima(tensors: dict[str, Tensor], model: TextModel) -> dict[str, Tensor]:
    """Tensors of an older version: with one M per feature where the model's map needs that."""
    expected = model.new_state(1, 0, cache_dtype(tensors, model)).tensors()
    return tensors | {
        name: x[..., None].expand(*x.shape, expected[name].shape[-1]).contiguous()
        for name, x in tensors.items()
        if name.endswith(".M") and name in expected and expected[name].ndim == x.ndim + 1
    }


def wrong_field(tensors: dict[str, Tensor], metadata: dict[str, str], model: TextModel) -> str | None:
    """The first field that no state of this model has, and why: its name, type, shape or values. None: all are good."""
    length, vocab = cache_length(tensors), model.config.vocab_size
    expected = {"logits": torch.zeros(1, vocab), "recent": torch.zeros(0, dtype=torch.long)}
    expected |= model.new_state(1, 0, cache_dtype(tensors, model)).tensors()
    masks = {name: torch.zeros(1, 0, dtype=torch.bool) for name in tensors if name.endswith(".mask")}
    masks = {name: mask for name, mask in masks.items() if name.replace(".mask", ".k") in expected}
    if names := sorted(set(expected | masks) ^ set(tensors)):
        return f"it {'lacks' if names[0] in expected else 'has an unknown'} {names[0]}"
    rows = tensors["position"].numel()
    for name, like in (expected | masks).items():
        x, shape = tensors[name], (rows, *(n or length for n in like.shape[1:]))
        if x.dtype != like.dtype or (x.ndim != 1 if name == "recent" else not rows or x.shape != shape):
            return f"{name} is {tuple(x.shape)} {x.dtype}; expected {like.dtype}, for {rows} rows"
        # a running maximum is −∞ before the first key
        if x.is_floating_point() and not (x < torch.inf if name.endswith(".M") else x.isfinite()).all():
            return f"{name} holds NaN or an infinity"
    return wrong_number(
        tensors["position"],
        tensors["recent"],
        metadata,
        vocab,
        length if any(name.endswith(".k") for name in expected) else None,
    )


def wrong_number(
    position: Tensor, recent: Tensor, metadata: dict[str, str], vocab: int, length: int | None
) -> str | None:
    """What is out of range in positions and last tokens. `length`: of the caches, None where there are none."""
    seen = int(position.max())
    if str(seen) != metadata.get("tokens_seen") or (position < 0).any():
        return f"position says {seen} tokens, tokens_seen {metadata.get('tokens_seen')}"
    if length is not None and length < seen:
        return f"its caches hold {length} of {seen} tokens"
    if ((recent < 0) | (recent >= vocab)).any():
        return f"recent holds a token that is not below {vocab}"
    return None


def cache_length(tensors: dict[str, Tensor]) -> int:
    """How many positions the key/value caches have filled; 0 where there are none."""
    return max((x.shape[2] for name, x in tensors.items() if name.endswith(".k") and x.ndim == 4), default=0)


def cache_dtype(tensors: dict[str, Tensor], model: TextModel) -> torch.dtype | None:
    """bfloat16 where a model in float32 kept its keys in that; else None, the model's own."""
    kept = {x.dtype for name, x in tensors.items() if name.endswith(".k")}
    return torch.bfloat16 if kept == {torch.bfloat16} and model.dtype == torch.float32 else None


def check_writable(path: str | Path, what: str = "the state") -> None:
    """UserError, before the work rather than after it, where there is no folder or no right to write."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UserError(f"{what} can't be written to {path}: it is a folder. Give a file in it.")
    if not target.parent.is_dir():
        raise UserError(f"{what} can't be written to {path}: there is no folder {target.parent}. Make it first.")
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise UserError(f"{what} can't be written to {path}: no permission. Give a place that you may write to.")
