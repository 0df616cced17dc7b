"""A dictionary of pronunciations, and the phones of a text by it."""

from pathlib import Path

from tarnn.errors import UserError


def read_pronunciations(path: str | Path) -> dict[str, list[str]]:
    """A dictionary of lines `WORD phone phone …`: the first pronunciation of each word.

    Raises UserError, with file and line, for a word without phones.
    """
    pronunciations: dict[str, list[str]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        word, *phones = line.split() or [""]
        if word and not phones:
            raise UserError(f"{path}, line {number}: the word {word} has no phones; expected `WORD phone …`.")
        if word and not word.endswith(")"):
            pronunciations[word] = phones
    return pronunciations


def phones_of(text: str, pronunciations: dict[str, list[str]], place: str) -> list[str]:
    """The phones of a text; UserError for a word that is not in the dictionary."""
    words = text.upper().split()
    if unknown := [word for word in words if word not in pronunciations]:
        raise UserError(f"{place}: the transcript has {unknown[0]!r}, which is not in the dictionary.")
    return [phone for word in words for phone in pronunciations[word]]
