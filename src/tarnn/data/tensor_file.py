"""Tensors in a safetensors file with a checksum, written all of it or nothing: what states and caches are saved with."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tarnn.errors import UserError


def checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 over all that a state file holds, but for the checksum itself."""
    rest = {key: value for key, value in metadata.items() if key != "checksum"}
    return add_tensors(hashlib.sha256(json.dumps(rest, sort_keys=True).encode()), tensors).hexdigest()


def add_tensors(digest: Any, tensors: dict[str, Tensor]) -> Any:
    """Names, shapes, dtypes and bits, in the order of the names."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest


def fields_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def read_safetensors(path: str | Path, what: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; UserError where there is none or it is cut short."""
    if not Path(path).is_file():
        raise UserError(f"no {what} file at {path}. {remedy}")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} is no {what} file, or one that was cut short ({error}). {remedy}") from error


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
