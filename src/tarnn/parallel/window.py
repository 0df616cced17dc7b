"""Hybrid attention to a causal window and sinks of sequences that several ranks share, each with a stretch of them.

Ranks exchange the keys and values at both ends of their stretches. Of these each makes the sinks and the window before its own
stretch, and attention goes on from there as from any state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.hybrid import at
from tarnn.numerics import wide, widest
from tarnn.ops.hybrid.arguments import Options
from tarnn.ops.states import HybridState
from tarnn.parallel.agreement import looks
from tarnn.parallel.collectives import gather, tied
from tarnn.parallel.group import Ranks, refuse
from tarnn.parallel.stretch import Stretch


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    log_decay: Tensor | None  # (b, g, t)
    cu_seqlens: Tensor | None


class _Edges(NamedTuple):
    """The real tokens at both ends of a stretch, the last w and the first s, with their log-decays up to its end."""

    k: Tensor  # (rows, g, w, d), zeros in front where there are fewer
    v: Tensor
    fade: Tensor  # (rows, g, w, 1)
    sink_k: Tensor  # (rows, g, s, d)
    sink_v: Tensor
    sink_fade: Tensor
    length: Tensor  # (rows,)  real tokens; as a float32 up to 16 million
    decay: Tensor  # (rows, g)  of what was before the stretch


def compute_attention(
    ranks: Ranks,
    whole: Callable,
    how: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_decay: Tensor | None,
    state: HybridState | None,
    state_too: bool,
    *step: bool,
) -> tuple[Tensor, HybridState | None, Tensor]:
    """Compute o of this rank's stretch, the state after the last rank's, and ρ. cu_seqlens and state: of whole sequences."""
    if not how.causal or how.feature_map is not None or how.slots or how.exact_queries is not None:
        refuse(
            "hybrid attention to both sides, with a feature map, with slots or with exact_queries",
            "Take a causal window and sinks alone, linear or softmax attention, or whole sequences.",
        )
    given = Inputs(q, k, v, key_mask, log_decay, cu_seqlens)
    facts = {"state": repr(state), "state_too": state_too} | {name: looks(x) for name, x in how._asdict().items()}
    stretch = Stretch.of(ranks, "hybrid_attention", given, ("q", "k", "v", "log_decay"), 2, **facts)
    if state is None:
        n = len(q) if stretch.cuts is None else len(stretch.cuts) - 1
        state = HybridState.zeros(k, v, 0, window=how.window, sinks=how.sinks, batch_size=n)
    state.check(how, q.dtype)
    here = state if stretch.cuts is None else _select(state, stretch.here)
    if stretch.is_shared:
        here = _continue(stretch, how, given, state, here)
    o, after, rho = whole(how, q, k, v, key_mask, stretch.local_bounds(cu_seqlens), log_decay, here, True, False, False)
    o = tied(o, here.k)  # a stretch without tokens uses nothing of it
    if not state_too or after is None:
        return o, None, rho
    tensors = {name: stretch.everywhere(x, getattr(state, name)) for name, x in vars(after).items()}
    return o, HybridState(**tensors), rho


def _continue(stretch: Stretch, how: Options, given: Inputs, before: HybridState, here: HybridState) -> HybridState:
    """Return the states with which this rank's rows begin. before: those before all ranks; here: of the sequences with tokens
    here."""
    last, entering = given, before
    if stretch.cuts is not None:
        part = stretch.last_tokens
        mask, decay = given.key_mask, given.log_decay
        mask, decay = None if mask is None else mask[:, part], None if decay is None else decay[:, :, part]
        last = Inputs(given.q[:, :, part], given.k[:, :, part], given.v[:, :, part], mask, decay, None)
        if (number := stretch.layout.open_at(stretch.cuts, stretch.layout.rank)) is not None:
            entering = _select(before, [number])
    edges = gather(stretch.ranks, *_edges(how, last))
    if (since := stretch.since) is not None:
        for other in range(since, stretch.layout.rank):
            entering = _move(how, entering, _Edges(*(x[other] for x in edges)))
        first = torch.tensor([0], device=given.k.device)
        here = entering if stretch.cuts is None else here.insert(first, entering)
    # outputs and states of every rank, also of the first, wait for the others
    return replace(here, **{name: tied(getattr(here, name), edges[0]) for name in ("k", "v", "fade", "S", "z")})


def _edges(how: Options, given: Inputs) -> _Edges:
    (b, g, t, _), w, s, device = given.k.shape, how.window, how.sinks, given.k.device
    kind = wide(given.k.dtype)
    real = torch.ones(b, t, dtype=torch.bool, device=device) if given.key_mask is None else given.key_mask
    if given.log_decay is None:
        decay = torch.zeros(b, g, t, dtype=widest(device), device=device)
    else:
        decay = given.log_decay.clamp(min=-1e4).to(widest(device))  # as `keys_of`
    decay = decay.masked_fill(~real[:, None], 0.0)
    fade = pad(decay, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)  # what came after each
    in_time = given.k, given.v, fade[..., None]
    to_end, to_front = (x.to(torch.int8).argsort(dim=-1, stable=True) for x in (real, ~real))  # where real tokens go
    window = [pad(at(x, to_end[:, max(0, t - w) :]), (0, 0, max(0, w - t), 0)) for x in in_time]
    sinks = [pad(at(x, to_front[:, :s]), (0, 0, 0, max(0, s - t))) for x in in_time]
    return _Edges(*(x.to(kind) for x in (*window, *sinks, real.sum(-1), decay.sum(-1))))


def _move(how: Options, state: HybridState, edges: _Edges) -> HybridState:
    """Return the state with sinks, window and count as they are after a stretch."""
    s, w, device = how.sinks, how.window, state.k.device
    new, before = edges.length.long()[:, None], state.count[:, None]
    number = torch.arange(s, device=device) - before  # which token of the stretch becomes each sink
    last = before + new - 1
    room = s + torch.arange(w, device=device)
    place = last - (last - room).remainder(w)  # the last token that the ring holds there
    fresh = torch.cat([(number >= 0) & (number < new), (place >= before) & (place >= s)], 1)[:, None, :, None]
    number, index = number.clamp(0, max(0, s - 1)), (place - last + w - 1).clamp(min=0)

    def moved(old: Tensor, sinks: Tensor, window: Tensor) -> Tensor:
        given = torch.cat([at(sinks, number), at(window, index)], 2).to(old.dtype)
        return torch.where(fresh, given, old)

    k, v = moved(state.k, edges.sink_k, edges.k), moved(state.v, edges.sink_v, edges.v)
    faded: Any = (state.fade + edges.decay[..., None].to(state.fade.dtype))[..., None]
    fade = moved(faded, edges.sink_fade, edges.fade)
    return replace(state, k=k, v=v, fade=fade[..., 0], count=(last + 1)[:, 0])


def _select(state: HybridState, rows: list[int]) -> HybridState:
    return state.select(torch.tensor(rows, device=state.k.device))
