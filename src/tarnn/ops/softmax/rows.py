"""Key/value caches of rows that are not equally long: what a server's rows carry from token to token."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tarnn.ops.softmax.state import KVCache
from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class RowCaches(State):
    """A cache for each row, of one row, with its own length and room.

    The fused step takes it in the place of a `KVCache`, where each row has as many keys as it has seen tokens. Layers don't.
    """

    grows = True

    rows: tuple[KVCache, ...]

    def select(self, rows: Int[Tensor, " k"]) -> "RowCaches":
        return RowCaches(tuple(self.rows[row].clone() for row in rows.tolist()))

    def insert(self, rows: Int[Tensor, " k"], other: "RowCaches") -> "RowCaches":
        mine = list(self.rows)
        for row, theirs in zip(rows.tolist(), other.rows, strict=True):
            mine[row] = theirs
        return RowCaches(tuple(mine))
