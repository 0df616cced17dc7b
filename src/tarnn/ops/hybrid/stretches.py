"""Hybrid attention of sequences that several ranks share, each with a stretch of them: what is said here is of causal ones.

Ranks exchange twice. First the keys and values at the edges of their stretches: of these each rank makes the sinks and the
window before its own. With them it finds which keys leave the window in its stretch, into the sums and the slots; all ranks
gather these, and fold those of the ranks before their own (`fold.py`). Then attention goes on from there as from any state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.feature_maps.by_name import map_for
from tarnn.kernels.hybrid import at
from tarnn.numerics import full_precision, wide, widest
from tarnn.ops.checks import check_attention
from tarnn.ops.hybrid.arguments import Options, check_global_tokens, check_lengths, check_options
from tarnn.ops.hybrid.fold import Far, far_of, folded, with_far, without_far
from tarnn.ops.hybrid.sides_of_stretches import attend_to_both_sides
from tarnn.ops.hybrid.state import HybridState
from tarnn.ops.stretches import Stretch
from tarnn.parallel.agreement import looks, telling
from tarnn.parallel.collectives import gather, gather_plain, tied
from tarnn.parallel.group import Ranks, alone, refuse


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    log_decay: Tensor | None
    global_tokens: Tensor | None = None  # a mask (b, t); places are options

    def part(self, part: slice) -> "Inputs":
        """At some positions, of one sequence."""
        decay = self.log_decay
        decay = decay if decay is None or decay.ndim == 1 else decay[:, :, part]
        q, k, v = (x[:, :, part] for x in self[:3])
        mask, marks = (None if x is None else x[:, part] for x in (self.key_mask, self.global_tokens))
        return Inputs(q, k, v, mask, decay, marks)


class _Edges(NamedTuple):
    """The real tokens at both ends of a stretch, the last w and the first s, with how much they have faded at its end."""

    k: Tensor  # (rows, g, w, d), zeros in front where there are fewer
    v: Tensor
    fade: Tensor  # (rows, g, w, 1)
    sink_k: Tensor  # (rows, g, s, d)
    sink_v: Tensor
    sink_fade: Tensor
    length: Tensor  # (rows,)  real tokens; as a float32 up to 16 million
    decay: Tensor  # (rows, g)  of what was before the stretch


class _Attend(NamedTuple):
    """Hybrid attention of tokens that one rank has, from a state."""

    op: Callable[..., Any]
    feature_map: Any
    options: dict[str, Any]

    def __call__(
        self, given: Inputs, cu_seqlens: Tensor | None, state: HybridState | None
    ) -> tuple[Tensor, Any, Tensor]:
        """o, where causal the state behind, and ρ."""
        q, k, v, key_mask, log_decay, marks = given
        options = self.options | {"key_mask": key_mask, "log_decay": log_decay, "cu_seqlens": cu_seqlens}
        options |= {} if marks is None else {"global_tokens": marks}
        causal = self.options["causal"]
        with alone():
            found = self.op(
                q, k, v, self.feature_map, state=state, return_state=causal, return_far_share=True, **options
            )
        return found if causal else (found[0], None, found[1])

    def parts(self, q: Tensor) -> Options:
        """What `fold.py` needs to know."""
        scale = self.options["scale"]
        phi = None if self.feature_map is None else map_for(self.feature_map, q)
        options = {name: x for name, x in self.options.items() if name != "global_tokens"}
        options |= {"feature_map": phi, "scale": q.shape[3] ** -0.5 if scale is None else scale}
        return Options(**options, global_places=self.options["global_tokens"])


def attend_stretch(
    ranks: Ranks,
    op: Callable[..., Any],
    given: Inputs,
    cu_seqlens: Tensor | None,
    state: HybridState | None,
    return_state: bool,
    feature_map: Any,
    options: dict[str, Any],
) -> tuple[Tensor, HybridState | None, Tensor]:
    """o of this rank's stretch, the state behind the last rank's if asked for, and ρ. cu_seqlens and state: of whole
    sequences."""
    causal = options["causal"] is True
    if causal and options["exact_queries"] is not None:
        refuse("causal hybrid attention with exact_queries", "Take softmax attention, or whole sequences.")
    with telling(ranks):
        check_global_tokens(options["global_tokens"], given.q, options["causal"])
        masks = {"key_mask": given.key_mask, "cu_seqlens": cu_seqlens, "log_decay": given.log_decay}
        check_attention(given.q, given.k, given.v, options["causal"], **masks)
        check_lengths(given.q, given.k)
        chosen = {name: x for name, x in options.items() if name not in ("far_until", "global_tokens")}
        check_options(given.q, log_decay=given.log_decay, state=state, return_state=return_state, **chosen)
        if (marks := options["global_tokens"]) is not None and marks.dtype == torch.bool:
            given, options = given._replace(global_tokens=marks), options | {"global_tokens": None}
        nobody = None if cu_seqlens is None else torch.zeros_like(cu_seqlens)
        attend = _Attend(op, feature_map, options)
        before = attend(given.part(slice(0, 0)), nobody, state)[1]
    facts: dict[str, Any] = {"the op": "hybrid_attention", "gradients": torch.is_grad_enabled(), "state": repr(state)}
    facts |= {name: looks(x) for name, x in options.items()} | {"feature_map": repr(feature_map)}
    axes = {"key_mask": 1, "global_tokens": 1}
    facts |= {name: looks(x, axes.get(name, 2)) for name, x in given._asdict().items() if x is not None}
    stretch = Stretch.agreed(ranks, given.q.shape[2], cu_seqlens, facts)
    if not causal:

        def whole(part: slice, cuts: list[int]) -> tuple[Tensor, Tensor]:
            o, _, rho = attend(given.part(part), None if cu_seqlens is None else cu_seqlens.new_tensor(cuts), None)
            return o, rho

        how, marks = attend.parts(given.q), given.global_tokens
        with full_precision(given.q):
            o, rho = attend_to_both_sides(stretch, how, whole, *given[:4], marks)
        return o, None, rho
    here = before if stretch.cuts is None else _of(before, stretch.here)
    if stretch.is_shared:
        here = _continued(stretch, attend, given, before, here)
    o, after, rho = attend(given, stretch.local_bounds(cu_seqlens), here)
    o = tied(o, here.k)  # no token here: it has seen none of them
    if not return_state:
        return o, None, rho
    return (
        o,
        HybridState(**{name: stretch.everywhere(x, getattr(before, name)) for name, x in vars(after).items()}),
        rho,
    )


def _continued(stretch: Stretch, attend: _Attend, given: Inputs, before: HybridState, here: HybridState) -> HybridState:
    """The states with which this rank's rows begin. before: those before all ranks; here: of the sequences with tokens here."""
    how, rank, since, last, base = attend.parts(given.q), stretch.layout.rank, stretch.since, given, before
    if stretch.cuts is not None:
        last = given.part(stretch.last_tokens)
        if (number := stretch.layout.open_at(stretch.cuts, rank)) is not None:
            base = _of(before, [number])
    earlier = [] if since is None else range(since, rank)
    edges = gather(stretch.ranks, *_edges(how, last))
    exchanged = edges[:1]
    entering = base
    for other in earlier:
        entering = _moved(how, entering, _Edges(*(x[other] for x in edges)))
    here = _entered(stretch, here, entering)
    if how.feature_map is not None or how.slots:
        start = here if stretch.cuts is None else _of(here, [len(stretch.here) - 1])
        part = far_of(how, attend(last, None, without_far(how, start))[1])
        parts = [
            x.detach() if name in ("M", "score") else x
            for name, x in zip(Far._fields, gather(stretch.ranks, *part[:-1]))
        ]
        places = (
            gather_plain(stretch.ranks, part.place)
            if how.slots
            else part.place.expand(stretch.ranks.size, *part.place.shape)
        )
        exchanged = [*exchanged, parts[0]]
        far = far_of(how, base)
        for other in earlier:
            far = folded(how, far, Far._make([*(x[other] for x in parts), places[other]]), edges[-1][other])
        here = _entered(stretch, here, with_far(how, entering, far))
    for x in exchanged:  # outputs and states of every rank, also of the first, wait for the others
        here = replace(here, **{name: tied(getattr(here, name), x) for name in ("k", "v", "fade", "S", "z")})
    return here


def _entered(stretch: Stretch, rows: HybridState, entering: HybridState) -> HybridState:
    """The states of this rank's rows, where what enters from earlier ranks is the first, or all of them."""
    if stretch.since is None:
        return rows
    return entering if stretch.cuts is None else rows.insert(torch.tensor([0], device=rows.k.device), entering)


def _edges(how: Options, given: Inputs) -> _Edges:
    (b, g, t, _), w, s, device = given.k.shape, how.window, how.sinks, given.k.device
    kind = wide(given.k.dtype)
    real = torch.ones(b, t, dtype=torch.bool, device=device) if given.key_mask is None else given.key_mask
    decay = (
        torch.zeros(b, g, t, device=device) if given.log_decay is None else given.log_decay.clamp(min=-1e4)
    )  # as `keys_of`
    decay = decay[None, :, None].expand(b, g, t) if decay.ndim == 1 else decay
    decay = decay.to(widest(device)).masked_fill(~real[:, None], 0.0)
    fade = pad(decay, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)  # what came after each
    in_time = given.k, given.v, fade[..., None]
    to_end, to_front = (x.to(torch.int8).argsort(dim=-1, stable=True) for x in (real, ~real))  # where real tokens go
    window = [pad(at(x, to_end[:, max(0, t - w) :]), (0, 0, max(0, w - t), 0)) for x in in_time]
    sinks = [pad(at(x, to_front[:, :s]), (0, 0, 0, max(0, s - t))) for x in in_time]
    return _Edges(*(x.to(kind) for x in (*window, *sinks, real.sum(-1), decay.sum(-1))))


def _moved(how: Options, state: HybridState, edges: _Edges) -> HybridState:
    """The state with sinks, window and count as they are behind a stretch. Its slots fade; its sums stay."""
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
        return torch.cat([torch.where(fresh, given, old[:, :, : s + w]), old[:, :, s + w :]], 2)

    k, v = moved(state.k, edges.sink_k, edges.k), moved(state.v, edges.sink_v, edges.v)
    fade = moved((state.fade + edges.decay[..., None].to(state.fade.dtype))[..., None], edges.sink_fade, edges.fade)
    return replace(state, k=k, v=v, fade=fade[..., 0], count=(last + 1)[:, 0])


def _of(state: HybridState, rows: list[int]) -> HybridState:
    return state.select(torch.tensor(rows, device=state.k.device))
