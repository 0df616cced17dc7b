"""What general compressors make of a text, in the unit of language models: bits per byte."""

import lzma
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

Compress = Callable[[bytes], int]  # bytes → size when compressed


class BitsPerByte(NamedTuple):
    """Of the text on its own, and of the text when the training text came before it."""

    alone: float
    after_training: float


def compressors() -> dict[str, Compress | None]:
    """The compressors that every model is compared with, by name; None where one isn't installed."""
    return {"xz -9e": xz, "zstd -19": zstd()}


def bits_per_byte(compress: Compress, text: bytes, training: bytes) -> BitsPerByte:
    """8·C(text) / |text|, and 8·(C(training + text) − C(training)) / |text|, C the compressed size.

    The second is the fair baseline of a trained model, which has seen the training text too. Raises ValueError
    for an empty text.
    """
    if not text:
        raise ValueError("an empty text has no bits per byte; expected at least one byte.")
    after = compress(training + text) - compress(training)
    return BitsPerByte(8 * compress(text) / len(text), 8 * after / len(text))


def xz(data: bytes) -> int:
    """As `xz -9 --extreme` does it: LZMA2 with a window of 64 MiB."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def zstd() -> Compress | None:
    """As `zstd -19` does it (a window of 8 MiB): by the Python package, else by the command, else None."""
    if find_spec("zstandard"):
        import zstandard

        return lambda data: len(zstandard.ZstdCompressor(level=19).compress(data))
    if shutil.which("zstd"):
        command = ["zstd", "-19", "--quiet", "--stdout"]
        return lambda data: len(subprocess.run(command, input=data, capture_output=True, check=True).stdout)
    return None
