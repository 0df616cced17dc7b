"""Transcripts as numbers: symbols (letters, phones) and the blank of CTC, which is number 0."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tarnn.errors import UserError

BLANK, SPACE = "<pad>", "|"
LETTERS = (SPACE, "'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Symbols(NamedTuple):
    """What a model can write, in the order of its numbers from 1 on."""

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


def read_pronunciations(path: str | Path) -> dict[str, list[str]]:
    """A dictionary of lines `WORD phone phone …`: the first pronunciation of each word.

    Raises UserError, with file and line, for a word without phones.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        word, *phones = line.split() or [""]
        if word and not phones:
            raise UserError(f"{path}, line {number}: the word {word} has no phones; expected `WORD phone …`.")
        if word and not word.endswith(")"):
            found[word] = phones
    return found


def phones_of(text: str, pronunciations: dict[str, list[str]], place: str) -> list[str]:
    """The phones of a text; UserError for a word that is not in the dictionary."""
    words = text.upper().split()
    if unknown := [word for word in words if word not in pronunciations]:
        raise UserError(f"{place}: the transcript has {unknown[0]!r}, which is not in the dictionary.")
    return [phone for word in words for phone in pronunciations[word]]
