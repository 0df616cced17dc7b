"""Rows that a program's `embed` adds and that no table of positions holds: a sequence's class, and sinusoidal positions."""

from typing import cast

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tarnn.models.positions import sinusoidal
from tarnn.program.instructions import Instruction, Program


def extra_rows(
    program: Program, positions: Int[Tensor, " n"], classes: Int[Tensor, " n"] | None = None
) -> Float[Tensor, "n width"] | None:
    """Compute what is added to each token's embedding; None for a program that adds nothing. classes: of each token.

    Raises ValueError where the program has classes and none are given, or the other way round.
    """
    embed = program.instructions[0]
    width, table, channels = embed.outputs[0].size, embed.weights.get("classes"), number(embed, "sinusoidal")
    if (table is None) != (classes is None):
        has = "no classes" if table is None else f"{len(table)} classes"
        raise ValueError(f"this program has {has}; got {'none' if classes is None else 'some'}.")
    rows = []
    if table is not None and classes is not None:
        rows.append(pad(table[classes] * number(embed, "scale"), (0, width - table.shape[1])))
    if channels:
        rows.append(pad(sinusoidal(positions, int(channels)), (width - int(channels), 0)))
    return sum(rows[1:], rows[0]) if rows else None


def number(instruction: Instruction, name: str) -> float:
    """Return an option that is a number."""
    return float(cast(float, instruction.numbers[name]))
