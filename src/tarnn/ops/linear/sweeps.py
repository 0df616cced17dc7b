"""Both sweeps of attention that fades to either side: the order in which they meet tokens, and what stands before these.

Of sequences that several ranks share, the second sweep begins on the last rank. So that no query needs a key of the next one,
each of its sequences has a place more on every rank, at which no key stands: keys come one place late there, and so next to
the queries that meet them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from tarnn.ops.backwards import Backwards
from tarnn.ops.stretches import Stretch
from tarnn.parallel.group import Ranks, among


class Sweep(NamedTuple):
    """One of the two. bounds: of the packed sequences in this process's row, cu_seqlens: of all. stretch: of several ranks."""

    cu_seqlens: Tensor | None
    bounds: Tensor | None
    stretch: Stretch | None = None

    def run(self, attend: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
        """Causal attention in the order of this sweep, not divided."""
        with among(None if self.stretch is None else self.stretch.ranks):
            return attend(*given, causal=True, normalize=False, cu_seqlens=self.cu_seqlens, **options)

    @torch.no_grad()
    def maxima_before(
        self, x: Shaped[Tensor, "b m t features"], log_decay: Shaped[Tensor, "b m t one_or_features"]
    ) -> Shaped[Tensor, "n m features"]:
        """The largest log-weights that keys before this process's rows have at their beginning; −∞ where there is none."""
        n = x.shape[0] if self.bounds is None else len(self.bounds) - 1
        nothing = x.new_full((n, x.shape[1], x.shape[3]), -torch.inf)
        stretch = self.stretch
        if stretch is None or not stretch.is_shared:
            return nothing
        decay = log_decay.to(x.dtype).expand_as(x)
        if stretch.cuts is not None:
            x, decay = x[:, :, stretch.last_tokens], decay[:, :, stretch.last_tokens]
        behind = pad(decay, (0, 0, 0, 1))[:, :, 1:].flip(2).cumsum(2).flip(2)  # −∞ costs no digits
        most = torch.cat([x + behind, stretch.last(nothing)[:, :, None]], 2).amax(2)
        entering = stretch.carried(lambda before, M, faded: torch.maximum(before + faded, M), most, decay.sum(2))
        if stretch.since is None:
            return nothing
        return entering if stretch.cuts is None else torch.cat([entering, nothing[1:]])


class BackwardsOverRanks:
    """`Backwards` of this rank's stretch."""

    def __init__(self, stretch: Stretch, num_tokens: int, device: torch.device):
        inner = [] if stretch.cuts is None else stretch.bounds[1:-1]
        token = torch.arange(num_tokens, device=device)
        number = torch.searchsorted(torch.tensor(inner, dtype=torch.int64, device=device), token, right=True)
        self.num_places = num_tokens + (len(inner) + 1 if num_tokens else 0)
        self.key = self.num_places - 1 - token - number
        self.query = self.key - 1

    def keys(self, x: Shaped[Tensor, "..."], dim: int = 2, *, of_none: float | bool = 0.0) -> Shaped[Tensor, "..."]:
        """What belongs to keys, time along `dim`; `of_none` in places that no key has."""
        return self._at(self.key, x, dim, of_none)

    def queries(self, x: Shaped[Tensor, "b h t ..."]) -> Shaped[Tensor, "b h places ..."]:
        """What belongs to queries; zeros in places that no query has."""
        return self._at(self.query, x, 2, 0.0)

    def outputs(self, o: Shaped[Tensor, "b h places ..."], of_none: float = 0.0) -> Shaped[Tensor, "b h t ..."]:
        """What came out, by token."""
        return o.index_select(2, self.query)

    def _at(self, index: Tensor, x: Tensor, dim: int, of_none: float | bool) -> Tensor:
        shape = list(x.shape)
        shape[dim] = self.num_places
        return x.new_full(shape, of_none).index_copy(dim, index, x)


Order = Backwards | BackwardsOverRanks


def two_sweeps(
    ranks: Ranks | None, facts: dict[str, Any], num_tokens: int, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Sweep, Sweep, Order]:
    """The sweep from the first token on, the one from the last, and the latter's order. facts: on which ranks have to agree."""
    if ranks is None:
        sweep = Sweep(cu_seqlens, cu_seqlens)
        return sweep, sweep, Backwards(num_tokens, cu_seqlens, device)
    first = Stretch.agreed(ranks, num_tokens, cu_seqlens, facts)
    order = BackwardsOverRanks(first, num_tokens, device)
    longer = None
    if cu_seqlens is not None:
        longer = cu_seqlens + pad(first.pieces().cumsum(0), (1, 0)).to(cu_seqlens)
        longer = longer[-1] - longer.flip(0)
    second = Stretch.agreed(ranks.turned(), order.num_places, longer, {"the op": "the second of two sweeps"})
    both: Sequence[tuple[Stretch, Tensor | None]] = (first, cu_seqlens), (second, longer)
    forward, back = (Sweep(whole, stretch.local_bounds(whole), stretch) for stretch, whole in both)
    return forward, back, order
