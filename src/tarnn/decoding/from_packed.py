"""Open a packed file to run its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tarnn.data.tokenizers import byte_backend
from tarnn.decoding.opened import Limits, Opened
from tarnn.decoding.packed_file import AGAIN, MORE_TEMPLATES, OF_TOKENIZERS, PackedFile, read_packed
from tarnn.decoding.refusal import Refusal
from tarnn.decoding.tokenizer import FILE as TOKENIZER, SavedTokenizer, open_tokenizer
from tarnn.errors import UserError
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.outline import program_of
from tarnn.program.runtime import Runtime, Unavailable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
WRONG = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class OfFile:
    """The weights of a packed file, as they were before they were packed."""

    num_parameters: int
    num_bytes: int
    hash: str

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def fingerprint(self) -> str:
        return self.hash


def open_packed(path: str | Path, weights: str | None = None) -> Opened:
    """Open a packed file. weights: None, or the format that it has.

    Raises UserError for a file that is none, damaged, of another version or of another format, and Refusal where there are no
    compiled kernels.
    """
    file = read_packed(path)
    try:
        return _opened(file, weights)
    except Unavailable as error:
        raise Refusal(f"{path} needs the compiled kernels: {error}.") from Refusal(str(error))
    except UserError as error:
        raise UserError(f"{path} {error}") from error
    except WRONG as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]:.200}). {AGAIN}") from error


def _opened(file: PackedFile, weights: str | None) -> Opened:
    facts: Mapping[str, Any] = file.facts
    kept = facts["weights"]
    if kept not in FORMATS:
        raise ValueError(f"its weights are {kept!r:.20}")
    if weights not in (None, kept):
        raise UserError(f"holds {kept} weights; expected them as {weights}. Pack its folder with --weights {weights}.")
    step = Runtime(program_of(facts["outline"], file.packed), kept, file.packed)
    step.new_state(1)
    vocab_size, most = facts["config"]
    if vocab_size != step.vocab_size or not (most is None or type(most) is int):
        raise ValueError(f"its vocabulary has {vocab_size!r:.20} tokens, and its table {step.vocab_size}")
    return Opened(
        contents=OfFile(int(facts["parameters"]), int(facts["bytes"]), str(facts["fingerprint"])),
        step=step,
        prefill=step.prefill,
        new_state=step.new_state,
        config=Limits(vocab_size, most),
        architecture=str(facts["architecture"]),
        fields=dict(facts["fields"]),
        weights=kept,
        dtype=DTYPES[facts["dtype"]],
        key_bytes=int(facts["key_bytes"]),
        end_ids=frozenset(map(int, facts["end_ids"])),
        pad_id=int(facts["pad_id"]),
        sampling={str(name): x for name, x in dict(facts["sampling"]).items() if isinstance(x, int | float)},
        about=(f"fused step ({kept} weights)", "packed"),
    )


def tokenizer_of_packed(path: Path, vocab_size: int) -> SavedTokenizer:
    """Open the tokenizer of a packed file, whose files are laid out for that while. Raises UserError where there is none."""
    files = read_packed(path).files
    if vocab_size == 256 and TOKENIZER not in files:
        return SavedTokenizer(byte_backend(), None, None)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / MORE_TEMPLATES).mkdir()
        for file, data in files.items():
            place = folder / file
            if file not in OF_TOKENIZERS and (place.parent != folder / MORE_TEMPLATES or place.suffix != ".jinja"):
                raise UserError(f"{path} is damaged: it holds {file!r:.60}, which is no file of a tokenizer. {AGAIN}")
            place.write_bytes(data.numpy().tobytes())
        try:
            return open_tokenizer(folder)
        except UserError as error:
            raise UserError(str(error).replace(name, str(path))) from error
