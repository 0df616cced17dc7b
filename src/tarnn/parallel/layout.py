"""Where the ranks' stretches lie in a whole sequence, and the packed sequences in them."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from tarnn.parallel.group import Ranks


class Layout(NamedTuple):
    """The stretch of rank r goes from starts[r] to starts[r + 1]."""

    rank: int
    starts: tuple[int, ...]  # (ranks + 1,)

    @classmethod
    def of(cls, rank: int, lengths: list[int]) -> "Layout":
        return cls(rank, (0, *accumulate(lengths)))

    @property
    def offset(self) -> int:
        """The position of this rank's first token."""
        return self.starts[self.rank]

    def open_at(self, cuts: list[int], rank: int) -> int | None:
        """The packed sequence that goes on from the ranks before into this one's stretch; None if one ends there."""
        start = self.starts[rank]
        i = bisect_left(cuts, start) - 1  # cuts[i] < start ≤ cuts[i + 1]
        return i if i >= 0 and start < cuts[i + 1] else None

    def shared(self, cuts: list[int]) -> list[int]:
        """The packed sequences with tokens on several ranks."""
        found = (self.open_at(cuts, rank) for rank in range(1, len(self.starts)))
        return sorted({i for i in found if i is not None})

    def holder(self, position: int) -> int:
        """The rank in whose stretch a token is."""
        return bisect_right(self.starts, position) - 1

    def sequences(self, cuts: list[int]) -> tuple[list[int], list[int]]:
        """The packed sequences with tokens in this rank's stretch, and where they begin and end there; of an empty stretch,
        the first, which is empty there too."""
        start, stop = self.starts[self.rank : self.rank + 2]
        here = [i for i in range(len(cuts) - 1) if max(cuts[i], start) < min(cuts[i + 1], stop)]
        if not here:
            return [0], [0, 0]
        return here, [max(cuts[i], start) - start for i in here] + [stop - start]


def cut(x: Tensor, dim: int = 1, group: Any = None) -> Tensor:
    """This rank's stretch of x along `dim`, a view: as equal as can be, the first ones longer by one token if need be."""
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    return x.tensor_split(ranks.size, dim)[ranks.rank]
