"""The processes that share sequences, the places of their stretches, and whether ops take their inputs as stretches."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from tarnn.errors import UserError


class Ranks:
    """The processes that share a sequence, and the place of this one among them.

    process_group, rank, size: as torch.distributed has them. bytes_sent: what this process has sent to the others so far,
    backward passes included; without what the transport adds.
    """

    def __init__(self, group: Any = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise UserError(
                "a sequence over several processes needs torch.distributed; got a process that has not joined. Start it with "
                "torchrun, and call torch.distributed.init_process_group() first."
            )
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise UserError(
                    f"one dimension of a device mesh shares sequences; got {group.ndim}, {group.mesh_dim_names}. Pass "
                    "mesh[name]."
                )
            group = group.get_group()
        self.process_group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise UserError(
                f"only ranks of a group can share its sequences; rank {dist.get_rank()} is not one. Pass its own group."
            )
        self.bytes_sent = 0


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
        """Return the packed sequence that goes on from the ranks before into this one's stretch; None if one ends there."""
        start = self.starts[rank]
        i = bisect_left(cuts, start) - 1  # cuts[i] < start ≤ cuts[i + 1]
        return i if i >= 0 and start < cuts[i + 1] else None

    def shared(self, cuts: list[int]) -> list[int]:
        """List the packed sequences with tokens on several ranks."""
        found = (self.open_at(cuts, rank) for rank in range(1, len(self.starts)))
        return sorted({i for i in found if i is not None})

    def holder(self, position: int) -> int:
        """Return the rank in whose stretch a token is."""
        return bisect_right(self.starts, position) - 1

    def sequences(self, cuts: list[int]) -> tuple[list[int], list[int]]:
        """Return the packed sequences with tokens in this rank's stretch, and their bounds there; of an empty stretch the first,
        which is empty there too."""
        start, stop = self.starts[self.rank : self.rank + 2]
        here = [i for i in range(len(cuts) - 1) if max(cuts[i], start) < min(cuts[i + 1], stop)]
        if not here:
            return [0], [0, 0]
        return here, [max(cuts[i], start) - start for i in here] + [stop - start]


# of the process, not of the thread: activation checkpointing computes again what autograd's own threads need
_active: Ranks | None = None


def active() -> Ranks | None:
    """Return the ranks that share the sequences of calls made now; None if each process has whole ones."""
    return _active


@contextmanager
def among(ranks: Ranks | None) -> Iterator[None]:
    """Let these ranks share sequences within this context; None: each process has whole ones."""
    global _active
    before, _active = _active, ranks
    try:
        yield
    finally:
        _active = before


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise NotImplementedError for what would see one stretch alone."""
    raise NotImplementedError(f"{what} has no form for sequences over several ranks. {remedy}")


def cut(x: Tensor, dim: int = 1, group: Any = None) -> Tensor:
    """Return this rank's stretch of x along `dim`, a view: as equal as can be, the first ones longer by one token if need be."""
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    return x.tensor_split(ranks.size, dim)[ranks.rank]
