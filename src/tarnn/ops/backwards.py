"""Sequences as a sweep from the last token to the first reads them: each query meets the keys behind it, and not its own."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tarnn.ops.packing import turned_around


class Backwards:
    """The order of keys in such a sweep, and of queries: each stands where the state has just taken in the key behind it.

    num_tokens: of a row. cu_seqlens: bounds of the sequences that are packed into one row, which are those of what comes out,
    too; None: each row is one.
    """

    def __init__(self, num_tokens: int, cu_seqlens: Int[Tensor, " n_plus_1"] | None, device: torch.device):
        token = torch.arange(num_tokens, device=device)
        if cu_seqlens is None:  # all have t places: torch.export would hold t − 1 to be no 1
            self.turned, self.is_last = token.flip(0), token == num_tokens - 1
            self.is_first = self.is_last
        else:
            self.turned = turned_around(token, cu_seqlens)  # the token in each place, and the place of each token
            self.is_first = torch.isin(self.turned, cu_seqlens[:-1])
            self.is_last = torch.isin(token + 1, cu_seqlens[1:])

    def keys(self, x: Shaped[Tensor, "..."], dim: int = 2) -> Shaped[Tensor, "..."]:
        """Return what belongs to keys, time along `dim`, in their places."""
        return x.index_select(dim, self.turned)

    def queries(self, x: Shaped[Tensor, "b h t ..."]) -> Shaped[Tensor, "b h places ..."]:
        """What belongs to queries; zeros in places that no query has."""
        return x.index_select(2, (self.turned - 1).clamp(min=0)).masked_fill(_like(x, self.is_first), 0.0)

    def outputs(self, o: Shaped[Tensor, "b h places ..."], of_none: float = 0.0) -> Shaped[Tensor, "b h t ..."]:
        """What came out, by token; `of_none` for those that have nothing behind them."""
        return o.index_select(2, self.turned.roll(-1)).masked_fill(_like(o, self.is_last), of_none)


def _like(x: Tensor, mask: Tensor) -> Tensor:
    """A mask (t,) that broadcasts to x (b, h, t, …)."""
    return mask.view(-1, *[1] * (x.ndim - 3))
