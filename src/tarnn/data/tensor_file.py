"""The format of state files, for tarnn's own models (`decoding/state_file.py`) and converted ones (`conversion/cache_file.py`).

A state file is safetensors. Its metadata: format, version, the fingerprint of the model that made it, and a checksum over
everything else. Files of other versions are refused.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as of_bytes, save as to_bytes
from torch import Tensor

from tarnn._version import __version__
from tarnn.errors import UserError

Buffer = bytes | memoryview
FORMAT, VERSION = "tarnn.state", "3"
OLD_FORMAT = "tarnn.cache"  # of the caches of converted models, once


class StateFile(NamedTuple):
    """The contents of a state file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def save(path: str | Path, tensors: dict[str, Tensor], fingerprint: str, *, what: str = "state", **facts: str) -> int:
    """Write a state file; return its size in bytes. facts: more metadata.

    Atomic, see `write_atomically`. Raises UserError where the file can't be written.
    """
    data = encode(tensors, fingerprint, **facts)
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"the {what} ({len(data):,} bytes) can't be written to {path}: {error.strerror}. What was there "
            f"is as it was. Make room, or give another place."
        ) from error
    return len(data)


def encode(tensors: dict[str, Tensor], fingerprint: str, **facts: str) -> bytes:
    """Return the bytes of a state file; arguments as in `save`."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    metadata = {"format": FORMAT, "format_version": VERSION, "tarnn_version": __version__, "fingerprint": fingerprint}
    metadata |= facts
    return to_bytes(tensors, metadata | {"checksum": checksum(tensors, metadata)})


def decode(data: bytes, fingerprint: str, source: str, *, what: str = "state", writer: str) -> StateFile:
    """Return what was given to `encode`, from bytes that somebody sent. source: their name in errors, those of `load`.

    Nothing is allocated beyond the tensors that the bytes hold.
    """
    try:
        tensors = of_bytes(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{source} is no {what} file, or one that was cut short ({error}). {writer} writes one."
        ) from error
    return checked(tensors, metadata, fingerprint, source, what, writer)


def load(path: str | Path, fingerprint: str, *, what: str = "state", writer: str) -> StateFile:
    """Read a state file. writer: the function or command that makes one, named in the errors.

    Raises UserError (a ValueError) for a file that is missing, cut short, no state file, changed since it was written, of
    another version of the format or of another model.
    """
    tensors, metadata = read_safetensors(path, what, f"{writer} writes one.")
    return checked(tensors, metadata, fingerprint, path, what, writer)


def checked(
    tensors: dict[str, Tensor], metadata: dict[str, str], fingerprint: str, source: str | Path, what: str, writer: str
) -> StateFile:
    """Return the contents of a state file of the model with this fingerprint, unchanged since it was written; or UserError."""
    kind, version = metadata.get("format", ""), metadata.get("format_version", "")
    if kind not in (FORMAT, OLD_FORMAT):
        raise UserError(f"{source} is a safetensors file, but not a saved {what}. {writer} writes one.")
    if (kind, version) != (FORMAT, VERSION):
        raise UserError(
            f"{source} has version {version} of the format {kind}; this tarnn reads version {VERSION} of {FORMAT}. "
            f"Make the {what} again: {writer} writes one."
        )
    if metadata.get("checksum") != checksum(tensors, metadata):
        raise UserError(
            f"{source} is damaged: its checksum is not that of its contents. Make the {what} again: {writer} writes one."
        )
    if metadata.get("fingerprint") != fingerprint:
        raise UserError(
            f"{source} was saved by another model: other weights, another config or another dtype. Give the "
            f"checkpoint that made it, or make the {what} again with this one."
        )
    return StateFile(tensors, metadata)


def fingerprint_of(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """SHA-256 over a config and all weights: name, shape, bits."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    return str(add_tensors(digest, tensors).hexdigest())


def checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 over all that a state file holds, but for the checksum itself."""
    rest = {key: value for key, value in metadata.items() if key != "checksum"}
    return add_tensors(hashlib.sha256(json.dumps(rest, sort_keys=True).encode()), tensors).hexdigest()


def add_tensors(digest: Any, tensors: dict[str, Tensor]) -> Any:
    """Names, shapes, dtypes and bits, in the order of the names."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest


def fields_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def read_safetensors(path: str | Path, what: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a safetensors file; UserError where there is none or it is cut short."""
    if not Path(path).is_file():
        raise UserError(f"no {what} file at {path}. {remedy}")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} is no {what} file, or one that was cut short ({error}). {remedy}") from error


def write_atomically(path: str | Path, data: bytes | Iterable[Buffer]) -> None:
    """Write `data`, or its parts, to `path`, all of it or nothing: what was there stays as it is until the new file is complete.

    Written beside it, flushed to the disk, then renamed over it. What is no regular file (a pipe, a device)
    is written to directly. Raises OSError: full disk, no such folder, no permission.
    """
    target, parts = Path(os.path.realpath(path)), (data,) if isinstance(data, bytes) else data
    if target.exists() and not target.is_file():
        with open(target, "wb", buffering=0) as file:
            for part in parts:
                write_all(file, part)
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb", buffering=0) as file:
            for part in parts:
                write_all(file, part)
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_all(file, data: Buffer) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def flush(path: str | Path) -> None:
    """Hand a file or folder to stable storage: a power cut must not undo what is marked as complete."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
