"""Both scans of sequences that several ranks share, each with a stretch of them.

A stretch takes the state h before it to e^D ⊙ h + n: n is what it makes of nothing, D the sum of its log-decays. All ranks
gather both, join those of the ranks before their own, and scan again from there.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from tarnn.ops.registration import Op
from tarnn.ops.stretches import Stretch
from tarnn.parallel.group import Ranks


def scan_stretch(
    ranks: Ranks, op: Op, call: Any, in_time: Collection[str], total_decay: Callable[[Any], Tensor], return_state: bool
) -> tuple[Tensor, Any]:
    """o of this rank's stretch and, if asked for, h behind the last rank's. call: with cu_seqlens and h of whole sequences.
    total_decay: of a call's tokens, as large as h."""
    stretch = Stretch.of(ranks, op.name, call, in_time, axis=1)
    here = call._replace(cu_seqlens=stretch.local_bounds(call.cu_seqlens), h=stretch.initial(call.h))
    if stretch.is_shared:
        last = _last_sequence(here, in_time, stretch)
        entering = stretch.carried(_join, op(last).h, total_decay(last))
        h = here.new_state().zero_() if here.h is None else here.h
        here = here._replace(h=stretch.entered(h, entering))
    o, h = op(here, with_state=return_state)[:2]
    return o, stretch.everywhere(h, call.h) if return_state else None


def summed(x: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of x (b, t, c) over real tokens: (b, c)."""
    return (x if key_mask is None else x.masked_fill(~key_mask[..., None], 0.0)).sum(1, dtype=dtype)


def _last_sequence(call: Any, in_time: Collection[str], stretch: Stretch) -> Any:
    """The call of the tokens that the last rows of state are of."""
    if stretch.cuts is None:
        return call
    tokens = {
        name: x[:, stretch.last_tokens] for name in (*in_time, "key_mask") if (x := getattr(call, name)) is not None
    }
    return call._replace(**tokens, cu_seqlens=None, h=None if call.h is None else call.h[-1:])


def _join(before: Tensor, h: Tensor, decay: Tensor) -> Tensor:
    return torch.addcmul(h, decay.exp(), before)
