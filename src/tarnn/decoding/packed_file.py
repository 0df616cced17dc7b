"""A packed file: one model in one safetensors file, laid out as the compiled runtime reads it. Opening maps it, without a copy.

    block, numbers, table.0, table.1    the packed program: see `program.packing.Packed`
    file:NAME                           files of the tokenizer and its chat templates, as they lay in the folder

Metadata: the format and its version; `facts`, JSON: the outline of the program, and what else `Opened` holds; a hash of the
facts and the numbers; CRC-32 of each tensor. Opening checks the hash alone: at 2 GB per second the sums would take longer than
all else, and read what may never be used; `check_contents`, and so `tarnn info`, checks them.

The block begins at a multiple of 64 bytes and has room to be read beyond its end. Its layout is the same for all instruction
sets. Processes that open one file share its pages. It must not be changed meanwhile; it may be replaced.
"""

import hashlib
import json
import mmap
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tarnn._version import __version__
from tarnn.data.tensor_file import write_atomically
from tarnn.decoding.chat_template import FILE as TEMPLATE, MORE as MORE_TEMPLATES
from tarnn.decoding.tokenizer import ADDED, FILE as TOKENIZER, SETTINGS, SPECIAL_MAP
from tarnn.errors import UserError
from tarnn.program.packing import VERSION as PROGRAM_VERSION, Packed

FORMAT, VERSION = "tarnn.packed", "2"
REMEDY = "`tarnn pack FOLDER FILE` writes one."
AGAIN = "Pack its folder again (tarnn pack)."
ALIGNED = 64
PIECE = 2**24  # bytes that are written at once
PREFIX = "file:"
OF_TOKENIZERS = (TOKENIZER, SETTINGS, SPECIAL_MAP, ADDED, TEMPLATE)
KINDS = {torch.uint8: "U8", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES = {name: dtype for dtype, name in KINDS.items()}


class PackedFile(NamedTuple):
    """The contents of a packed file. files: those of the tokenizer, by name."""

    packed: Packed
    facts: dict[str, Any]
    files: dict[str, Tensor]


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder's tokenizer, those of them that there are."""
    names = [*OF_TOKENIZERS, *(f"{MORE_TEMPLATES}/{x.name}" for x in sorted((folder / MORE_TEMPLATES).glob("*.jinja")))]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def write_packed(path: str | Path, packed: Packed, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> int:
    """Write a packed file; return its size in bytes. facts: JSON's data. Nothing is left behind where it can't be written."""
    tensors = {"block": packed.block, "numbers": packed.numbers}
    tensors |= {f"table.{i}": x for i, x in sorted(enumerate(packed.tables), key=lambda x: -x[1].itemsize)}
    for name, data in files.items():
        tensors[PREFIX + name] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    text = json.dumps(facts)
    header = _header(tensors, text, checksum(text, packed.numbers))
    size = len(header) + sum(x.nbytes for x in tensors.values())
    try:
        write_atomically(path, _parts(header, tensors.values()))
    except OSError as error:
        raise UserError(
            f"the packed file ({size:,} bytes) can't be written to {path}: {error.strerror}. Nothing is left of it; make "
            "room, or give another place."
        ) from error
    return size


def _header(tensors: Mapping[str, Tensor], facts: str, checksum: str) -> bytes:
    """Return safetensors' header, so long that what follows is aligned. No tensor lies across its own type's boundary."""
    about = {"format": FORMAT, "format_version": VERSION, "tarnn_version": __version__}
    sums = json.dumps({name: sum_of(x) for name, x in tensors.items()})
    entries: dict[str, Any] = {"__metadata__": about | {"facts": facts, "checksum": checksum, "sums": sums}}
    at = 0
    for name, x in tensors.items():
        entries[name] = {"dtype": KINDS[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _parts(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for x in tensors:
        data = _bytes(x)
        yield from (data[at : at + PIECE] for at in range(0, len(data), PIECE))


def _bytes(x: Tensor) -> memoryview:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def sum_of(x: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(_bytes(x))


def checksum(facts: str, numbers: Tensor) -> str:
    return hashlib.sha256(facts.encode() + numbers.numpy().tobytes()).hexdigest()


def read_packed(path: str | Path) -> PackedFile:
    """Map a packed file. Raises UserError for one that is missing, none, cut short, damaged or of another version.

    The numbers of its program are not looked at; that is for whoever opens it.
    """
    tensors, metadata = _mapped(path)
    version, facts = metadata.get("format_version"), metadata.get("facts", "")
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but no packed model. {REMEDY}")
    if version != VERSION or sys.byteorder != "little":
        raise UserError(
            f"{path} has version {version!r:.20} of packed files; this tarnn reads version {VERSION}. {AGAIN}"
        )
    numbers, block = (tensors.get(x, torch.empty(0)) for x in ("numbers", "block"))
    whole = (numbers.dtype, block.dtype) == (torch.int64, torch.uint8)
    if not whole or metadata.get("checksum") != checksum(facts, numbers):
        raise UserError(f"{path} is damaged: its header is not the one that was written. {AGAIN}")
    if numbers[:1].tolist() != [PROGRAM_VERSION]:
        raise UserError(
            f"{path} has a program of version {numbers[:1].tolist()}; this tarnn runs version {PROGRAM_VERSION}. {AGAIN}"
        )
    tables = [tensors[x] for x in ("table.0", "table.1") if x in tensors]
    if block.data_ptr() % ALIGNED or any(x.data_ptr() % x.itemsize for x in (numbers, *tables)):
        raise UserError(f"{path} is damaged: its tensors do not lie where they should. {AGAIN}")
    files = {x.removeprefix(PREFIX): y for x, y in tensors.items() if x.startswith(PREFIX)}
    return PackedFile(Packed(numbers, block, tables), json.loads(facts), files)


def check_contents(path: str | Path) -> None:
    """Read all of a packed file. Raises UserError where its weights, tables or files are not those that were written."""
    tensors, metadata = _mapped(path)
    sums = json.loads(metadata.get("sums", "{}"))
    wrong = [name.removeprefix(PREFIX) for name, x in tensors.items() if sums.get(name) != sum_of(x)]
    if wrong:
        raise UserError(f"{path} is damaged: {', '.join(wrong[:3])} changed since it was written. {AGAIN}")


def _mapped(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a file to be read only: Linux refuses what could be written, of more bytes than it has memory. (tensors, metadata)."""
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}. {REMEDY}")
    try:
        with safe_open(path, "np") as header, Path(path).open("rb") as file:
            memory, tensors = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), {}
            at = 8 + int.from_bytes(memory[:8], "little")
            for name in header.offset_keys():
                part = header.get_slice(name)
                tensors[name] = _tensor(memory, at, TYPES[part.get_dtype()], part.get_shape())
                at += tensors[name].nbytes
            return tensors, header.metadata() or {}
    except (SafetensorError, OSError, RuntimeError, KeyError) as error:
        raise UserError(f"{path} is no packed file, or one that was cut short ({error}). {REMEDY}") from error


def _tensor(memory: mmap.mmap, at: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return a tensor of bytes from `at` on, which keeps their memory."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=at).view(shape)
