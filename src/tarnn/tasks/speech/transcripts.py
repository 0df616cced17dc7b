"""Transcripts as numbers: symbols (letters, phones) and the blank of CTC, which is number 0."""

from collections.abc import Iterable, Sequence
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
