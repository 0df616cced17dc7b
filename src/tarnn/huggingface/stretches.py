"""Documents and labels of rows that several ranks share: what a rank can't know from its own stretch of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.parallel.agreement import agree, looks
from tarnn.parallel.collectives import gather, gather_plain
from tarnn.parallel.group import Ranks


def bounds_over_ranks(ranks: Ranks, numbers: Tensor, step: int) -> Tensor | None:
    """Bounds of the documents in a row over all ranks, from its numbers: a document goes on while they grow by `step`. None if
    each row is one document. Raises ValueError for documents in several rows."""
    layout = agree(ranks, numbers.shape[1], {"the op": "documents", "numbers": looks(numbers, 1)})
    longest = max(stop - start for start, stop in zip(layout.starts, layout.starts[1:]))
    everyone = gather_plain(ranks, pad(numbers, (0, longest - numbers.shape[1])))
    lengths = [stop - start for start, stop in zip(layout.starts, layout.starts[1:])]
    whole = torch.cat([x[:, :n] for x, n in zip(everyone, lengths)], 1)  # (b or 1, all tokens)
    begins = whole.diff(dim=-1) != step
    if not begins.any():
        return None
    if len(whole) > 1:
        raise ValueError(
            f"packed documents over several ranks lie in one row; got {len(whole)}. Lay the rows end to end, and cut the one row."
        )
    cuts = begins[0].nonzero().flatten() + 1
    return pad(pad(cuts, (1, 0)), (0, 1), value=whole.shape[1]).int()


def whole_rows(ranks: Ranks, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x (b, t, …) and its mask of all ranks, end to end: as large as the whole rows, on every rank."""
    layout = agree(ranks, x.shape[1], {"the op": "rows", "x": looks(x, 1), "mask": looks(mask, 1)})
    lengths = [stop - start for start, stop in zip(layout.starts, layout.starts[1:])]
    missing = max(lengths) - x.shape[1]
    padded = pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    everyone = gather(ranks, padded)[0] if x.is_floating_point() else gather_plain(ranks, padded)
    whole = torch.cat([part[:, :n] for part, n in zip(everyone, lengths)], 1)
    if mask is None:
        return whole, None
    masks = gather_plain(ranks, pad(mask.to(torch.uint8), (0, missing)))
    return whole, torch.cat([part[:, :n] for part, n in zip(masks, lengths)], 1).to(mask.dtype)


def offset_of(ranks: Ranks | None, length: int) -> int:
    """How many tokens of a row lie on earlier ranks."""
    return 0 if ranks is None else agree(ranks, length, {"the op": "offset"}).offset


def cuts_here(ranks: Ranks, cuts: Tensor, length: int) -> Tensor:
    """Those bounds (n,) of a whole row that lie in this rank's stretch, or at one of its ends, counted from its beginning."""
    cuts = cuts - offset_of(ranks, length)
    return cuts[(cuts >= 0) & (cuts <= length)]


def labels_of_next(ranks: Ranks, labels: Tensor, ignored: int) -> Tensor:
    """Labels (b, t) one place earlier: behind the last one stands the first of the next rank that has any."""
    agree(ranks, labels.shape[1], {"the op": "labels", "labels": looks(labels, 1)})
    has_some = labels.new_full((len(labels), 1), labels.shape[1] > 0)
    first = torch.cat([has_some, pad(labels, (0, 1), value=ignored)[:, :1]], 1)  # (b, 2)
    following = labels.new_full((len(labels), 1), ignored)
    for theirs in gather_plain(ranks, first)[ranks.rank + 1 :].flip(0):
        following = torch.where(theirs[:, :1] > 0, theirs[:, 1:], following)
    return torch.cat([labels, following], 1)[:, 1:].contiguous()


def share_of_loss(ranks: Ranks, labels: Tensor, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a loss that makes it this rank's share of the mean over all ranks' labels: the ranks' losses add up to it."""
    if arguments.get("num_items_in_batch") is not None:
        return dict(arguments)
    counted = (labels != arguments.get("ignore_index", -100)).sum()
    return {**arguments, "num_items_in_batch": gather_plain(ranks, counted).sum().clamp(min=1)}
