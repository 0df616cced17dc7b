"""Calls of recurrent ops over several ranks: rows of state of this rank, and what ranks hand on to one another."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.packing import bounds
from tarnn.parallel.agreement import agree, looks
from tarnn.parallel.collectives import add, gather, tied
from tarnn.parallel.group import Layout, Ranks


class Stretch(NamedTuple):
    """This rank's part of a call: rows that each are a stretch of one sequence, or a stretch of a row of packed sequences.

    A rank's own rows of state are those of the batch, or of packed sequences one for each that has tokens here. Of these the
    first may go on from earlier ranks, and the last may go on to later ones; where nothing is packed, all rows do both.
    """

    ranks: Ranks
    layout: Layout
    cuts: list[int] | None  # of all packed sequences, in the whole row
    here: list[int]  # the packed sequences with tokens here, and
    bounds: list[int]  # where they begin and end in this stretch

    @classmethod
    def of(cls, ranks: Ranks, op: str, call: Any, in_time: Collection[str], axis: int, **more: Any) -> "Stretch":
        """Make the stretch of a call. in_time: its fields with a time axis, at `axis`. more: further facts, or other ones for a
        field. Raises UserError where ranks make different calls."""
        fields = call._asdict()
        axes = dict.fromkeys(in_time, axis) | {"key_mask": 1}
        facts: dict[str, Any] = {"the op": op} | {name: looks(x, axes.get(name)) for name, x in fields.items()}
        watched = [name for name, x in fields.items() if isinstance(x, Tensor) and x.requires_grad]
        facts["gradients"] = ", ".join(watched) if torch.is_grad_enabled() else "none"
        length = fields[next(iter(in_time))].shape[axis]
        return cls.agreed(ranks, length, fields["cu_seqlens"], facts | more)

    @classmethod
    def agreed(cls, ranks: Ranks, length: int, cu_seqlens: Tensor | None, facts: dict[str, Any]) -> "Stretch":
        """Make the stretch of this length, after all ranks have stated these facts."""
        if cu_seqlens is not None:
            facts = facts | {"cu_seqlens": str(cu_seqlens.tolist())}
        layout = agree(ranks, length, facts)
        if cu_seqlens is None:
            return cls(ranks, layout, None, [], [])
        cuts = bounds(cu_seqlens, layout.starts[-1])
        return cls(ranks, layout, cuts, *layout.sequences(cuts))

    @property
    def since(self) -> int | None:
        """Rank where the sequence that goes on in this stretch begins; None: none does."""
        rank = self.layout.rank
        if self.cuts is None:
            return 0 if rank else None
        number = self.layout.open_at(self.cuts, rank)
        return None if number is None else self.layout.holder(self.cuts[number])

    @property
    def until(self) -> int | None:
        """Rank where the sequence that goes on after this stretch ends; None: none does."""
        rank, last = self.layout.rank, len(self.layout.starts) - 2
        if self.cuts is None:
            return last if rank < last else None
        number = None if rank == last else self.layout.open_at(self.cuts, rank + 1)
        return None if number is None else self.layout.holder(self.cuts[number + 1] - 1)

    @property
    def is_shared(self) -> bool:
        """Whether any sequence has tokens on several ranks."""
        return self.cuts is None or bool(self.layout.shared(self.cuts))

    @property
    def last_tokens(self) -> slice:
        """Tokens of the last packed sequence here, in this stretch."""
        return slice(*self.bounds[-2:])

    def local_bounds(self, like: Tensor | None) -> Any:
        """Return cu_seqlens of this stretch."""
        return None if like is None else like.new_tensor(self.bounds)

    def initial(self, state: Tensor | None) -> Any:
        """Return the rows of a given state with which the sequences here begin: zeros where one has begun on an earlier rank."""
        if state is None:
            return None
        rows = state if self.cuts is None else state[self.here]
        if self.since is None:
            return rows
        went_on = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        went_on[: len(rows) if self.cuts is None else 1] = True
        # autograd sees those that are masked: backward has to wait
        return rows.masked_fill(went_on.view(-1, *[1] * (rows.ndim - 1)), 0.0)

    def first(self, rows: Tensor) -> Tensor:
        """Select the rows that may go on from earlier ranks."""
        return rows if self.cuts is None else rows[:1]

    def last(self, rows: Tensor) -> Tensor:
        """Select the rows that may go on to later ranks."""
        return rows if self.cuts is None else rows[-1:]

    def ending(self) -> list[int]:
        """List the rows whose packed sequences end here."""
        cuts, (begin, end) = self.cuts or [], self.layout.starts[self.layout.rank : self.layout.rank + 2]
        return [row for row, number in enumerate(self.here) if begin < cuts[number + 1] <= end]

    def entered(self, rows: Tensor, entering: Tensor) -> Tensor:
        """Add what `carried` has brought to the first rows of state."""
        if self.cuts is None:
            return rows + entering
        return torch.cat([rows[:1] + entering, rows[1:]])

    def carried(self, join: Callable[..., Tensor], *parts: Tensor, back: bool = False) -> Tensor:
        """Return what enters the first rows: the first of these parts where their sequence begins, joined with later ranks'.

        parts: what this rank makes of its last rows. join(before, *parts of the next rank). Zeros where no sequence goes on.
        back: the same from the last rank to the first, of what enters the last rows; parts: of the first rows.
        """
        gathered = gather(self.ranks, *parts)
        source, rank = self.until if back else self.since, self.layout.rank
        if source is None:
            return tied(torch.zeros_like(parts[0]), gathered[0])
        entering = gathered[0][source]
        for other in range(source - 1, rank, -1) if back else range(source + 1, rank):
            entering = join(entering, *(x[other] for x in gathered))
        return entering

    def everywhere(self, rows: Tensor, initial: Tensor | None) -> Tensor:
        """Return the state after each sequence, on every rank, from this rank's rows. initial: the states before all ranks."""
        if self.cuts is None:
            is_last = self.layout.rank == len(self.layout.starts) - 2
            return add(self.ranks, rows if is_last else tied(torch.zeros_like(rows), rows))[0]
        cuts, ending = self.cuts, self.ending()
        states = rows.new_zeros(len(cuts) - 1, *rows.shape[1:])
        numbers = torch.tensor([self.here[row] for row in ending], dtype=torch.int64, device=rows.device)
        whole = add(self.ranks, states.index_copy(0, numbers, rows[ending]))[0]
        empty = [number for number, (start, stop) in enumerate(zip(cuts, cuts[1:])) if start == stop]
        if initial is None or not empty:
            return whole
        return whole.index_copy(0, torch.tensor(empty, device=rows.device), initial[empty])
