"""The rows of hybrid attention to both sides that ranks share, and what each piece of them hands to the others.

A rank has one piece of each row; of a row of packed sequences two: of the sequence that goes on from earlier ranks, and of the
one that goes on to later ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.hybrid import at
from tarnn.ops.stretches import Stretch
from tarnn.parallel.collectives import gather_plain, largest
from tarnn.parallel.group import Ranks


class Pieces(NamedTuple):
    """This rank's pieces, as rows whose real tokens stand in front. All are of one length, of one token at least."""

    q: Tensor  # (n, h, t, d)
    k: Tensor  # (n, g, t, d)
    v: Tensor  # (n, g, t, e)
    real: Tensor  # (n, t)
    marks: Tensor | None  # (n, t)  global tokens, if they are told by a mask


class Family(NamedTuple):
    """Which pieces of all ranks belong to the same sequences as this rank's."""

    ranks: Ranks
    row: Tensor  # (n, ranks)  which row of a rank is of the sequence of this one's row; below 0: none
    counts: Tensor  # (n, ranks)  real tokens, 0 where there is none

    @classmethod
    def of(cls, stretch: Stretch, real: Tensor) -> "Family":
        ranks, layout, cuts = stretch.ranks, stretch.layout, stretch.cuts
        if cuts is None:
            row = torch.arange(len(real), device=real.device)[:, None].expand(-1, ranks.size)
        else:
            numbers = [_of_rank(layout.open_at(cuts, i), layout.open_at(cuts, i + 1)) for i in range(ranks.size - 1)]
            numbers.append(_of_rank(layout.open_at(cuts, ranks.size - 1), None))
            mine = numbers[ranks.rank]
            found = [[theirs.index(i) if i is not None and i in theirs else -1 for theirs in numbers] for i in mine]
            row = torch.tensor(found, device=real.device)
        family = cls(ranks, row, row)
        return family._replace(counts=family.of_mine(gather_plain(ranks, real.sum(-1)), 0))

    def of_mine(self, gathered: Tensor, nothing: float | bool) -> Tensor:
        """(ranks, n, …) → (n, ranks, …): of each rank what belongs to this one's rows, or `nothing`."""
        rank = torch.arange(self.ranks.size, device=gathered.device)
        found = gathered[rank, self.row.clamp(min=0)]
        return found.masked_fill((self.row < 0).view(*self.row.shape, *[1] * (found.ndim - 2)), nothing)

    def places(self, real: Tensor) -> Tensor:
        """Where the tokens of this rank's pieces stand in their sequences, (n, t)."""
        return self.counts[:, : self.ranks.rank].sum(-1, keepdim=True) + real.cumsum(-1) - 1


def _of_rank(first: int | None, last: int | None) -> tuple[int | None, int | None]:
    return first, None if last == first else last


def pieces_of(
    stretch: Stretch, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, marks: Tensor | None
) -> Pieces:
    """This rank's pieces; `order_of` says where their tokens stand."""
    index, real = order_of(stretch, q, key_mask)
    if stretch.cuts is not None:
        q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
        marks = None if marks is None else marks.expand(2, -1)
    if not q.shape[2]:  # one token that is none
        q, k, v = (pad(x, (0, 0, 0, 1)) for x in (q, k, v))
        marks = None if marks is None else pad(marks, (0, 1))
    q, k, v = (at(x, index).masked_fill(~real[:, None, :, None], 0.0) for x in (q, k, v))
    return Pieces(q, k, v, real, None if marks is None else marks.gather(1, index) & real)


def order_of(stretch: Stretch, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which tokens of x (b, h, t, d) the places of its pieces hold, and which of them are real: (n, places) both."""
    b, t, device = x.shape[0], x.shape[2], x.device
    real = torch.ones(b, t, dtype=torch.bool, device=device) if key_mask is None else key_mask
    if stretch.cuts is not None:
        first, last = ends_of(stretch)
        token = torch.arange(t, device=device)
        real = torch.stack([real[0] & (token < first), real[0] & (token >= last)])
    length = max(1, int(real.sum(-1).max())) if real.numel() else 1
    real = pad(real, (0, max(0, 1 - t)))
    order = (~real).to(torch.int8).argsort(dim=-1, stable=True)[:, :length]
    return order, real.gather(1, order)


def ends_of(stretch: Stretch) -> tuple[int, int]:
    """Where the piece of the sequence that goes on from earlier ranks ends in this stretch, and where that of one that goes on
    to later ranks begins."""
    length = stretch.layout.starts[stretch.layout.rank + 1] - stretch.layout.offset
    first = 0 if stretch.since is None else stretch.bounds[1]
    goes_through = stretch.since is not None and len(stretch.here) == 1
    return first, length if stretch.until is None or goes_through else stretch.bounds[-2]


def most(ranks: Ranks, *marks: Tensor) -> list[int]:
    """How many are True in a row of each of these masks, at most, on any rank."""
    counts = torch.stack([x.sum(-1).max() for x in marks])
    return largest(ranks, counts).tolist()


def first_of(there: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The first n places that are True in each row (…, t), and whether there are so many."""
    order = (~there).to(torch.int8).argsort(dim=-1, stable=True)[..., :n]
    missing = n - order.shape[-1]
    return pad(order, (0, missing)), pad(there.gather(-1, order), (0, missing))


def last_of(there: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The last n places that are True, in order, likewise; what is missing stands in front."""
    index, found = first_of(there.flip(-1), n)
    return (there.shape[-1] - 1 - index).clamp(min=0).flip(-1), found.flip(-1)
