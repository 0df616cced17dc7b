"""Recordings as numbers: wav files, and the symbols of transcripts with the blank of CTC, which is number 0.

The frames that a model reads of a recording: `tarnn.models.SpeechFeatures`.
"""

import wave
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tarnn.errors import UserError


def read_wav(path: str | Path, stream: BinaryIO | None = None) -> tuple[np.ndarray, int]:
    """The samples of a mono wav file, float32 in −1 … 1, and how many there are per second.

    stream: its bytes, where it lies in an archive; path is then its name, for messages. Raises UserError, with the file, for
    what is no wav file, more than one channel, samples of no or an unknown size, a file that is cut short or has no sound.
    """
    try:
        with wave.open(str(path) if stream is None else stream) as file:  # type: ignore[arg-type]
            channels, width, rate, promised = file.getparams()[:4]
            data = file.readframes(promised)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a wav file.") from None
    except (wave.Error, EOFError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(
            f"{path} is not a wav file that can be read ({str(error) or 'it ends too early'}); expected uncompressed "
            "samples (PCM). Convert it: `sox IN OUT.wav`."
        ) from None
    if channels != 1:
        raise UserError(f"{path} has {channels} channels; expected one. Mix them: `sox IN.wav -c 1 OUT.wav`.")
    if width > 4:
        raise UserError(
            f"{path} has samples of {8 * width} bits; expected 8, 16, 24 or 32. Convert it: `sox IN.wav -b 16 OUT.wav`."
        )
    if len(data) != promised * width:
        raise UserError(
            f"{path} is cut short: it promises {promised:,} samples and holds {len(data) // width:,}. Take an intact copy."
        )
    if not promised:
        raise UserError(f"{path} holds no sound: it has no samples.")
    if width == 1:
        return np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1, rate
    if width == 3:  # no type has three bytes: a zero byte below each
        data = np.pad(np.frombuffer(data, np.uint8).reshape(-1, 3), ((0, 0), (1, 0))).tobytes()
    samples = np.frombuffer(data, "<i2" if width == 2 else "<i4")
    return (samples / 2.0 ** (15 if width == 2 else 31)).astype(np.float32), rate


BLANK, SPACE = "<pad>", "|"
LETTERS = (SPACE, "'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Symbols(NamedTuple):
    """Symbols that a model writes, in the order of their numbers from 1 on."""

    names: tuple[str, ...]

    def ids(self, names: Iterable[str], place: str) -> np.ndarray:
        """Their numbers; UserError, with the place, for one that is unknown."""
        number = {name: i for i, name in enumerate(self.names, start=1)}
        names = list(names)
        if unknown := [name for name in names if name not in number]:
            raise UserError(
                f"{place}: the transcript has {unknown[0]!r}, which is not among the symbols {' '.join(self.names)}."
            )
        return np.array([number[name] for name in names], dtype=np.int64)

    def text_of(self, ids: Sequence[int], joined: str = "") -> str:
        return joined.join(self.names[i - 1] for i in ids)


def letters_of(text: str) -> list[str]:
    """The letters of words, which a | separates."""
    return list(SPACE.join(text.upper().split()))
