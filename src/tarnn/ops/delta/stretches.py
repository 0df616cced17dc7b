"""Both delta rules of sequences that several ranks share, each with a stretch of them.

The rules are linear in the state, so a stretch takes the state S before it to M S + N: N is what it makes of nothing, M (d, d)
what it makes of the identity where it writes no values. One call with d more columns gives both, and the outputs:

    values [v, 0], state [0, I]  →  outputs [o, r], state [N, M]            o_i + S_before r_i

All ranks gather M and N, and join those before their own.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tarnn.numerics import full_precision, widen
from tarnn.ops.registration import Op
from tarnn.ops.stretches import Stretch
from tarnn.parallel.collectives import tied
from tarnn.parallel.group import Ranks


def compute_stretch(
    ranks: Ranks, op: Op, call: Any, in_time: Collection[str], return_state: bool
) -> tuple[Tensor, Tensor | None]:
    """o of this rank's stretch and, if asked for, S behind the last rank's. call: with cu_seqlens and S of whole sequences."""
    stretch = Stretch.of(ranks, op.name, call, in_time, axis=2)
    here = call._replace(cu_seqlens=stretch.local_bounds(call.cu_seqlens), S=stretch.initial(call.S))
    if not stretch.is_shared:
        o, S = op(here, with_state=return_state)[:2]
    elif stretch.since is None:
        o, S = op(here)[:2]
        last = stretch.last(S)
        entering = stretch.carried(_join, last, last.new_zeros(*last.shape[:2], *[call.k.shape[3]] * 2))
        o, S = tied(o, entering), stretch.entered(S, entering)
    else:
        with full_precision(call.q):
            o, S = _continued(op, here, in_time, stretch)
    return o, stretch.everywhere(S, call.S) if return_state else None


def _continued(op: Op, call: Any, in_time: Collection[str], stretch: Stretch) -> tuple[Tensor, Tensor]:
    """o and S of a stretch whose first rows go on from earlier ranks."""
    (d, e), vectors = (call.k.shape[3], call.v.shape[3]), {name: getattr(call, name) for name in in_time}
    S = call.new_state().zero_() if call.S is None else call.S
    identity = torch.zeros(*S.shape[:2], d, d, dtype=S.dtype, device=S.device)
    stretch.first(identity).diagonal(dim1=-2, dim2=-1).fill_(1.0)
    # in the wide type, so that o is rounded once
    wider = call._replace(**{name: None if x is None else widen(x) for name, x in vectors.items()})
    v = torch.cat([wider.v, wider.v.new_zeros(*call.v.shape[:3], d)], -1)
    outputs = op(wider._replace(v=v, S=torch.cat([S, identity], -1)))
    (o, response), (N, M) = outputs.o.split((e, d), -1), outputs.S.split((e, d), -1)
    entering = stretch.carried(_join, stretch.last(N), stretch.last(M))
    end = o.shape[2] if stretch.cuts is None else stretch.bounds[1]
    more = response[:, :, :end].unflatten(1, (S.shape[1], -1)) @ entering[:, :, None]  # (b, n, r, t, e)
    o = torch.cat([o[:, :, :end] + more.flatten(1, 2), o[:, :, end:]], 2)
    return o.to(call.q.dtype), stretch.entered(N, stretch.first(M) @ entering)


def _join(before: Tensor, N: Tensor, M: Tensor) -> Tensor:
    return M @ before + N
