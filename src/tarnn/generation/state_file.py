"""A model's state in a file: read a book once, continue from it many times.

The file is safetensors. Tensors: `position` (b,), `logits` (b, vocab) of the token that comes next, `recent`
(the last few tokens, so that text can go on in the middle of a character), and for layer i `layers.i.S`, `.z`
(and `.M`) or, of a softmax layer, the filled part of its cache `layers.i.k`, `.v` (and `.mask`). Metadata:
what it is, its version, the fingerprint of the model that made it, the tokens seen.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tarnn._version import __version__
from tarnn.errors import UserError
from tarnn.models import ModelState, TarnnConfig, TarnnForCausalLM
from tarnn.ops import KVCache, LinearState, State

FORMAT, FORMAT_VERSION = "tarnn.state", "1"
NOT_THE_FUNCTION = {
    "use_cache",
    "dropout",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


def fingerprint(model: TarnnForCausalLM) -> str:
    """SHA-256 over the config, less what doesn't change the function, and all weights: name, shape, bits."""
    config = {k: getattr(model.config, k) for k in TarnnConfig.known_keys() if k not in NOT_THE_FUNCTION}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class SavedState(NamedTuple):
    """What a state file holds, on the model's device."""

    state: ModelState
    logits: Float[Tensor, "b v"]
    recent: list[int]


def save_state(
    path: str | Path,
    model: TarnnForCausalLM,
    state: ModelState,
    logits: Float[Tensor, "b v"],
    recent: list[int],
) -> int:
    """Writes the state, the next token's logits and the last tokens; returns the file's size in bytes.

    Atomic, see `write_atomically`. Raises UserError where the file can't be written.
    """
    tensors = state.tensors() | {"logits": logits, "recent": torch.tensor(recent, dtype=torch.long)}
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tarnn_version": __version__,
        "fingerprint": fingerprint(model),
        "tokens_seen": str(int(state.position.max())),
    }
    data = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, metadata)
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"the state ({len(data):,} bytes) can't be written to {path}: {error.strerror}. What was there "
            f"is as it was. Make room, or give another place."
        ) from error
    return len(data)


def load_state(path: str | Path, model: TarnnForCausalLM, *, room: int = 0) -> SavedState:
    """The state that `save_state` wrote. `room`: tokens that caches must still be able to hold.

    Raises UserError (a ValueError) for a file that is missing, cut short, no state, of another version of the
    format or of another model.
    """
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} is a safetensors file, but not a saved state. `tarnn generate --state-out` writes one."
        )
    if metadata.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path} has version {metadata.get('format_version')} of the state format; this tarnn reads "
            f"version {FORMAT_VERSION}. Make the state again with this tarnn."
        )
    if metadata.get("fingerprint") != fingerprint(model):
        raise UserError(
            f"{path} was saved by another model: other weights, another config or another dtype. Give the "
            f"checkpoint that made it, or make the state again with this one."
        )
    device = next(model.parameters()).device
    tensors = {name: x.to(device) for name, x in tensors.items()}
    position = tensors.pop("position")
    state = model.new_state(position.shape[0], capacity=int(position.max()) + room)
    layers = tuple(fill_layer(layer, i, tensors) for i, layer in enumerate(state.layers))
    return SavedState(ModelState(layers, position), tensors["logits"], tensors["recent"].tolist())


def fill_layer(empty: State, i: int, tensors: dict[str, Tensor]):
    """The layer's fresh state with the file's numbers in it; the fingerprint has vouched for their shapes."""
    if isinstance(empty, KVCache):
        empty.append(tensors[f"layers.{i}.k"], tensors[f"layers.{i}.v"], tensors.get(f"layers.{i}.mask"))
        return empty
    if isinstance(empty, LinearState):
        S, z, M = (tensors.get(f"layers.{i}.{name}") for name in "SzM")
        assert S is not None
        assert z is not None
        return LinearState(S, z, M)
    return empty


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; UserError where there is none or it is cut short."""
    if not Path(path).is_file():
        raise UserError(f"no state file at {path}. `tarnn generate --state-out {path}` writes one.")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            f"{path} is no state file, or one that was cut short ({error}). Make the state again with "
            "--state-out."
        ) from error


def check_writable(path: str | Path, what: str = "the state") -> None:
    """UserError, before the work rather than after it, where there is no folder or no right to write."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UserError(f"{what} can't be written to {path}: it is a folder. Give a file in it.")
    if not target.parent.is_dir():
        raise UserError(
            f"{what} can't be written to {path}: there is no folder {target.parent}. Make it first."
        )
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise UserError(
            f"{what} can't be written to {path}: no permission. Give a place that you may write to."
        )


def write_atomically(path: str | Path, data: bytes) -> None:
    """`data` to `path`, all of it or nothing: what was there stays as it is until the new file is complete.

    Written beside it, flushed to the disk, then renamed over it. What is no regular file (a pipe, a device)
    is written to directly. Raises OSError: full disk, no such folder, no permission.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(target, "wb", buffering=0) as file:
            write_all(file, data)
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_all(file, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
