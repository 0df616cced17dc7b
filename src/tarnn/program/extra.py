"""Rows that a program's `embed` adds and that no table of positions holds: a sequence's class, and sinusoidal positions."""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tarnn.models.positions import sinusoidal
from tarnn.program.instructions import Program


def extra_rows(
    program: Program, positions: Int[Tensor, " n"], condition: Float[Tensor, "n m"] | None = None
) -> Float[Tensor, "n width"] | None:
    """Compute what is added to each token's embedding; None for a program that adds nothing.

    condition: the row of each token's class, of the table "classes" of `embed`. Raises ValueError where the program has classes
    and there is no condition, or the other way round.
    """
    embed = program.instructions[0]
    width, classes = embed.outputs[0].size, embed.weights.get("classes")
    scale, channels = (cast(float, embed.numbers[name]) for name in ("scale", "sinusoidal"))
    if (classes is None) != (condition is None):
        has = "no classes" if classes is None else f"{len(classes)} classes"
        raise ValueError(f"this program has {has}; got {'no' if condition is None else 'a'} row of a class.")
    rows: list[Tensor] = []
    if condition is not None:
        condition = condition.to(torch.promote_types(condition.dtype, torch.float32))
        rows.append(pad(condition * scale, (0, width - condition.shape[1])))
    if channels:
        rows.append(pad(sinusoidal(positions, int(channels)), (width - int(channels), 0)))
    return sum(rows[1:], rows[0]) if rows else None
