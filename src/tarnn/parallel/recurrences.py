"""Delta rules, scans and convolutions of sequences that several ranks share, each with a stretch of them.

A stretch takes the state before it to a linear function of it. All ranks gather the parts of that function, and join those of
the ranks before their own:

    delta rules: S → M S + N. N is what a stretch makes of nothing, M (d, d) what it makes of the identity where it writes no
        values. One call with d more columns gives both, and the outputs: values [v, 0], state [0, I] → outputs [o, r], state
        [N, M]; then o_i + S_before r_i.
    scans: h → e^D ⊙ h + n. n is what a stretch makes of nothing, D the sum of its log-decays. Then it is scanned again.
    convolutions: the state is the last few real tokens.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels import delta, diagonal_scan, low_rank_delta, selective_scan
from tarnn.numerics import full_precision, widen
from tarnn.ops.registration import Op
from tarnn.parallel.collectives import tied
from tarnn.parallel.convolution import convolve
from tarnn.parallel.group import Ranks
from tarnn.parallel.stretch import Stretch


class Kind(NamedTuple):
    """An op: fields of its calls with a time axis, at `axis`, and the field of the state.

    run(op, call, stretch, in_time, with_state): o and the rows of state after this rank's stretch, where ranks share a sequence.
    """

    in_time: Collection[str]
    axis: int
    state: str
    run: Callable[..., tuple[Tensor, Any]]


def compute_op(ranks: Ranks, whole: Callable, op: Op, call: Any, *, with_state: bool = True) -> Any:
    """Compute a call of any op from this rank's stretch; its cu_seqlens and state are those of whole sequences.

    whole: `Op.__call__`, which computes the ops that are not in `KINDS`.
    """
    if (kind := KINDS.get(op.name)) is None:
        return whole(op, call, with_state=with_state)
    stretch = Stretch.of(ranks, op.name, call, kind.in_time, kind.axis, with_state=with_state)
    before = getattr(call, kind.state)
    here = call._replace(cu_seqlens=stretch.local_bounds(call.cu_seqlens), **{kind.state: stretch.initial(before)})
    compute = partial(whole, op)
    if stretch.is_shared:
        o, state = kind.run(compute, here, stretch, kind.in_time, with_state)
    else:
        o, state = _results(compute(here, with_state=with_state), kind)
    after = stretch.everywhere(state, before) if with_state else None
    return op.nothing._replace(**{"o": o, kind.state: after})


def _results(outputs: Any, kind: Kind) -> tuple[Tensor, Any]:
    return outputs.o, getattr(outputs, kind.state)


# --- delta rules


def _delta(
    op: Callable, call: Any, stretch: Stretch, in_time: Collection[str], with_state: bool
) -> tuple[Tensor, Tensor]:
    if stretch.since is not None:
        with full_precision(call.q):
            return _continued(op, call, in_time, stretch)
    o, S = op(call)[:2]
    last = stretch.last(S)
    entering = stretch.carried(_join_delta, last, last.new_zeros(*last.shape[:2], *[call.k.shape[3]] * 2))
    return tied(o, entering), stretch.entered(S, entering)


def _continued(op: Callable, call: Any, in_time: Collection[str], stretch: Stretch) -> tuple[Tensor, Tensor]:
    """Compute o and S of a stretch whose first rows go on from earlier ranks."""
    (d, e), vectors = (call.k.shape[3], call.v.shape[3]), {name: getattr(call, name) for name in in_time}
    S = call.new_state().zero_() if call.S is None else call.S
    identity = torch.zeros(*S.shape[:2], d, d, dtype=S.dtype, device=S.device)
    stretch.first(identity).diagonal(dim1=-2, dim2=-1).fill_(1.0)
    # in the wide type, so that o is rounded once
    wider = call._replace(**{name: None if x is None else widen(x) for name, x in vectors.items()})
    v = torch.cat([wider.v, wider.v.new_zeros(*call.v.shape[:3], d)], -1)
    outputs = op(wider._replace(v=v, S=torch.cat([S, identity], -1)))
    (o, response), (N, M) = outputs.o.split((e, d), -1), outputs.S.split((e, d), -1)
    entering = stretch.carried(_join_delta, stretch.last(N), stretch.last(M))
    end = o.shape[2] if stretch.cuts is None else stretch.bounds[1]
    more = response[:, :, :end].unflatten(1, (S.shape[1], -1)) @ entering[:, :, None]  # (b, n, r, t, e)
    o = torch.cat([o[:, :, :end] + more.flatten(1, 2), o[:, :, end:]], 2)
    return o.to(call.q.dtype), stretch.entered(N, stretch.first(M) @ entering)


def _join_delta(before: Tensor, N: Tensor, M: Tensor) -> Tensor:
    return M @ before + N


# --- scans


def _scan(
    total_decay: Callable[[Any], Tensor],
    op: Callable,
    call: Any,
    stretch: Stretch,
    in_time: Collection[str],
    with_state: bool,
) -> tuple[Tensor, Any]:
    last = _last_sequence(call, in_time, stretch)
    entering = stretch.carried(_join_scans, op(last).h, total_decay(last))
    h = call.new_state().zero_() if call.h is None else call.h
    return op(call._replace(h=stretch.entered(h, entering)), with_state=with_state)[:2]


def _last_sequence(call: Any, in_time: Collection[str], stretch: Stretch) -> Any:
    """Cut the call to the tokens that the last rows of state are of."""
    if stretch.cuts is None:
        return call
    tokens = {
        name: x[:, stretch.last_tokens] for name in (*in_time, "key_mask") if (x := getattr(call, name)) is not None
    }
    return call._replace(**tokens, cu_seqlens=None, h=None if call.h is None else call.h[-1:])


def _join_scans(before: Tensor, h: Tensor, decay: Tensor) -> Tensor:
    return torch.addcmul(h, decay.exp(), before)


def _sum(x: Tensor, call: Any) -> Tensor:
    """Sum x (b, t, c) over real tokens: (b, c)."""
    mask = call.key_mask
    return (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).sum(1, dtype=call.dtype)


def _diagonal_decay(call: Any) -> Tensor:
    return _sum(call.log_decay, call)


def _selective_decay(call: Any) -> Tensor:
    return _sum(call.dt, call)[..., None] * call.A.to(call.dtype)


KINDS = {
    "delta": Kind(delta.Call.in_time, 2, "S", _delta),
    "low_rank_delta": Kind(low_rank_delta.Call.in_time, 2, "S", _delta),
    "diagonal_scan": Kind(diagonal_scan.Call.in_time, 1, "h", partial(_scan, _diagonal_decay)),
    "selective_scan": Kind(selective_scan.Call.in_time, 1, "h", partial(_scan, _selective_decay)),
    "convolution": Kind(("x",), 1, "S", convolve),
}
