"""A model's state in a file: read a book once, continue from it many times.

The format is `data/tensor_file.py`. Tensors: `position` (b,), `logits` (b, vocab) of the token that comes next (none before the
first one: `tarnn tune-state` writes such files), `recent`
(the last few tokens, so that text can go on in the middle of a character), and for layer i `layers.i.S`, `.z`
(and `.M`) or, for a softmax layer, the filled part of its cache `layers.i.k`, `.v` (and `.mask`). Metadata: the tokens
seen. By checksum and fingerprint a file is what `save_state` wrote for this model, so
its fields are not looked at.
"""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.data.tensor_file import fields_of, fingerprint_of, load, save
from tarnn.errors import UserError
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.state import ModelState
from tarnn.ops import State

NOT_THE_FUNCTION = {"dropout"}
# config keys that were added later, with the values that reproduce the behaviour before
LATER = {
    "attention_options": {},
    "causal": True,
    "input_size": None,
    "subsampling": 1,
    "front": "stack",
    "conv_kernel": None,
}


def fingerprint(model: TextModel) -> str:
    """SHA-256 over all weights and the config, except keys that don't change the function."""
    return fingerprint_of(model.state_dict(), facts_of(model.config))


def facts_of(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a config that change the function, with their values."""
    chosen = {x.name: getattr(config, x.name) for x in fields(ModelConfig) if x.name not in NOT_THE_FUNCTION}
    return {k: x for k, x in chosen.items() if k not in LATER or x != LATER[k]}


def key_of(model: Any) -> str:
    """Return the fingerprint of a `TextModel`, or of what `open_step` opened."""
    return fingerprint(model) if isinstance(model, TextModel) else model.fingerprint


class SavedState(NamedTuple):
    """The contents of a state file, on the model's device."""

    state: ModelState
    logits: Float[Tensor, "b v"] | None
    recent: list[int]


def save_state(
    path: str | Path, model: Any, state: ModelState, logits: Float[Tensor, "b v"] | None, recent: list[int]
) -> int:
    """Write the state, the next token's logits and the last tokens; return the file's size in bytes.

    model: a `TextModel`, or what `open_step` opened. logits: None before the first token.

    Atomic: a file that was there stays until the new one is complete. Raises UserError where it can't be written.
    """
    tensors = state.tensors() | {"recent": torch.tensor(recent, dtype=torch.long)}
    tensors |= {} if logits is None else {"logits": logits}
    seen = str(int(state.position.max()))
    return save(path, tensors, key_of(model), tokens_seen=seen)


def load_state(path: str | Path, model: Any, *, room: int = 0) -> SavedState:
    """Read what `save_state` wrote. `room`: tokens that caches must still be able to hold.

    Raises UserError (a ValueError) for a file that is missing, cut short, no state, changed since it was written, of
    another version of the format or of another model.
    """
    tensors = load(path, key_of(model), writer=f"`tarnn generate --state-out {path}`").tensors
    tensors = {name: x.to(model.device) for name, x in tensors.items()}
    logits, recent, position = tensors.pop("logits", None), tensors.pop("recent"), tensors.pop("position")
    kinds = model.new_state(1, 0).layers
    empty = model.new_state(len(position), cache_length(tensors, kinds) + room, cache_dtype(tensors, kinds))
    layers = (layer.filled(fields_of(tensors, f"layers.{i}.")) for i, layer in enumerate(empty.layers))
    return SavedState(ModelState(tuple(layers), position), logits, recent.tolist())


def cache_length(tensors: dict[str, Tensor], layers: Sequence[State]) -> int:
    """Return how many positions the key/value caches have filled; 0 where there are none. layers: a state of the model."""
    return max((x.shape[2] for x in _keys(tensors, layers) if x.ndim == 4), default=0)


def cache_dtype(tensors: dict[str, Tensor], layers: Sequence[State]) -> torch.dtype | None:
    """Return bfloat16 where keys were kept in that; else None, the model's own."""
    return torch.bfloat16 if {x.dtype for x in _keys(tensors, layers)} == {torch.bfloat16} else None


def _keys(tensors: dict[str, Tensor], layers: Sequence[State]) -> list[Tensor]:
    names = [f"layers.{i}.k" for i, x in enumerate(layers) if x.grows]
    return [tensors[name] for name in names if name in tensors]


def check_writable(path: str | Path, what: str = "the state") -> None:
    """UserError, before the work rather than after it, where there is no folder or no right to write."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UserError(f"{what} can't be written to {path}: it is a folder. Give a file in it.")
    if not target.parent.is_dir():
        raise UserError(f"{what} can't be written to {path}: there is no folder {target.parent}. Make it first.")
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise UserError(f"{what} can't be written to {path}: no permission. Give a place that you may write to.")
