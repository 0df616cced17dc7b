"""Protein sequences from FASTA and Stockholm files, compressed or not, one at a time.

Letters are the 20 amino acids and six that stand for others (IUPAC-IUB 1983): B = D or N, Z = E or Q, J = I or L, X = any;
U = selenocysteine, O = pyrrolysine. Small letters, which mark regions in some files, are read as capitals.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tarnn.data.files import opened, plain_suffix
from tarnn.errors import UserError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
OTHERS = "BJOUXZ"
FASTA, STOCKHOLM = (".fasta", ".fa", ".faa"), (".sto", ".stk", ".stockholm")
GAPS = str.maketrans("", "", "-._~")  # of an alignment
STRANGE = re.compile(f"[^{AMINO_ACIDS}{OTHERS}]")
WHAT_TO_DO = "Correct the file, or convert it to sequences of amino acids"


Line = tuple[str, str]  # its place, for messages, and its text


class Protein(NamedTuple):
    """One sequence, its letters capital and without gaps."""

    name: str  # all of the header line
    sequence: str
    place: str  # file and line, for messages


def is_protein_file(path: Path) -> bool:
    """Whether the name says FASTA or Stockholm, under the suffix of a compression too."""
    return plain_suffix(path).lower() in FASTA + STOCKHOLM


def read_proteins(path: str | Path) -> Iterator[Protein]:
    """The sequences of a FASTA or Stockholm file in its order; of an alignment without its gaps.

    Little is held in memory: one sequence, or one alignment. Raises UserError, with file and line, for sequences without
    a header, letters that are no amino acids, empty sequences, alignments that are cut short or not aligned, a damaged
    compression, and a file with no sequence in it.
    """
    path, found = Path(path).expanduser(), False
    with opened(path) as stream:
        lines = ((f"{path}, line {n}", text(line)) for n, line in enumerate(stream, start=1))
        first = next(lines, None)
        if first is not None:
            read = read_stockholm if first[1].startswith("# STOCKHOLM") else read_fasta
            for protein in read(first, lines):
                found = True
                yield protein
    if not found:
        raise UserError(f"{path} holds no sequence; expected FASTA or Stockholm.")


def text(line: bytes) -> str:
    """A header may hold anything; what can't be decoded is shown as such."""
    return line.decode("utf-8", "replace").strip()


def read_fasta(first: Line, lines: Iterator[Line]) -> Iterator[Protein]:
    """Records of a header line, `>name`, and sequence lines; blank lines are passed over."""
    header: Line | None = None
    parts: list[str] = []

    def record() -> Iterator[Protein]:
        if header is not None:
            if not any(parts):
                raise UserError(
                    f"{header[0]}: the sequence of {header[1]:.60} is empty. {WHAT_TO_DO}, or remove its header."
                )
            yield Protein(header[1], "".join(parts), header[0])

    for place, line in chain([first], lines):
        if line.startswith(">"):
            yield from record()
            header, parts = (place, line[1:].strip() or "(no name)"), []
        elif line and header is None:
            raise UserError(
                f"{place}: expected a FASTA header, which begins with '>', before the first sequence; got {line:.30}."
            )
        elif line:
            parts.append(checked(line, place))
    yield from record()


def read_stockholm(first: Line, lines: Iterator[Line]) -> Iterator[Protein]:
    """Alignments that begin with `# STOCKHOLM 1.0` and end with `//`; between them rows of `name letters`, where a name
    may come again, block by block, with more of its letters."""
    rows: dict[str, tuple[str, list[str]]] = {}
    begun, place = False, first[0]
    for place, line in chain([first], lines):
        if line.startswith("# STOCKHOLM"):
            begun = True
        elif line == "//":
            yield from unaligned(rows, place)
            rows, begun = {}, False
        elif line and not line.startswith("#"):
            name, _, letters = line.partition(" ")
            if not begun or not letters.strip():
                raise UserError(f"{place}: expected a row of an alignment, a name and its letters; got {line:.30}.")
            rows.setdefault(name, (place, []))[1].append(letters.strip())
    if begun:
        raise UserError(
            f"{place}: the alignment is cut short; expected // at its end. Take an intact copy of the file."
        )


def unaligned(rows: dict[str, tuple[str, list[str]]], end: str) -> Iterator[Protein]:
    """The sequences of one alignment, whose rows must be equally long."""
    width = None
    for name, (place, parts) in rows.items():
        row = "".join(parts)
        width = len(row) if width is None else width
        if len(row) != width:
            raise UserError(
                f"{place}: the row of {name:.60} has {len(row)} columns and the first row {width}; all rows of an alignment "
                f"have equally many (it ends in {end})."
            )
        sequence = checked(row.translate(GAPS), place)
        if not sequence:
            raise UserError(f"{place}: the row of {name:.60} has gaps only. {WHAT_TO_DO}, or remove the row.")
        yield Protein(name, sequence, place)


def checked(letters: str, place: str) -> str:
    """As capitals; UserError for one that is no amino acid."""
    letters = letters.upper()
    if strange := STRANGE.search(letters):
        raise UserError(
            f"{place}: {strange[0]!r} is not an amino acid; expected the letters {AMINO_ACIDS} and, for others, {OTHERS}. "
            f"{WHAT_TO_DO}."
        )
    return letters
