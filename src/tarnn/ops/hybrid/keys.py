"""The keys that queries of a call may see, with what the state holds of earlier ones; and the state after them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.hybrid import Outputs, at, room_of
from tarnn.numerics import marked, set_aside, widest
from tarnn.ops.hybrid.arguments import Options
from tarnn.ops.states import HybridState


class Keys(NamedTuple):
    """The previous window followed by the new keys (w + t positions); `there` marks the valid ones.

    A key's fade at new token i is clock_i + birth_j, in float64: differences of long sums.
    """

    k: Tensor  # (b, g, w + t, d)
    v: Tensor
    place: Tensor  # (b, w + t) in its sequence; below 0: none
    there: Tensor  # (b, w + t)
    birth: Tensor  # (b, g, w + t)
    clock: Tensor  # (b, g, t)
    sink_k: Tensor  # (b, g, s, d), those before and those among the new
    sink_v: Tensor
    sink_birth: Tensor
    real: Tensor  # (b, t)
    sees_all: Tensor | None = None  # (b, t)  the queries that see every key exactly; None: none


class SlotRow(NamedTuple):
    """The keys in the slots before, and after them those of `Keys`, finite ones."""

    k: Tensor  # (b, g, c + w + t, d)
    v: Tensor
    birth: Tensor  # (b, g, c + w + t)
    place: Tensor


def keys_of(how: Options, state: HybridState, k, v, real, log_decay) -> Keys:
    (b, g, t, _), w, s, device = k.shape, how.window, how.sinks, k.device
    # e^−10⁴ is 0
    decay = torch.zeros(b, g, t, device=device) if log_decay is None else log_decay.clamp(min=-1e4)
    clock = decay.to(widest(decay.device)).masked_fill(~real[:, None], 0.0).cumsum(-1)
    place = state.count[:, None] - w + torch.arange(w + t, device=device)
    there = torch.cat([place[:, :w] >= s, real], dim=1)
    fresh = torch.arange(s, device=device) - state.count[:, None]  # (b, s): which new token becomes this sink
    old, index = (fresh < 0)[:, None, :, None], fresh.clamp(0, t - 1)
    sink_k, sink_v = state.k[:, :, :s], state.v[:, :, :s]
    sink_birth = state.fade[:, :, :s, None].to(clock.dtype)
    if s:
        sink_k, sink_v = torch.where(old, sink_k, at(k, index)), torch.where(old, sink_v, at(v, index))
        sink_birth = torch.where(old, sink_birth, at(-clock[..., None], index))
    ring = room_of(place[:, :w].clamp(min=s), s, w)
    before_k, before_v, fade = (at(x, ring) for x in (state.k, state.v, state.fade[..., None]))
    return Keys(
        torch.cat([before_k, k], 2),
        torch.cat([before_v, v], 2),
        place,
        there,
        torch.cat([fade[..., 0].to(clock.dtype), -clock], 2),
        clock,
        sink_k,
        sink_v,
        sink_birth[..., 0],
        real,
    )


def with_exact_queries(how: Options, keys: Keys) -> Keys:
    """Mark the queries that see every key."""
    if how.exact_queries is None:
        return keys
    tokens = torch.arange(keys.real.shape[1], device=keys.real.device)
    return keys._replace(sees_all=torch.isin(tokens, how.exact_queries)[None] & keys.real)


COUNTED = (
    "hybrid_attention counts its exact queries, which no graph holds: for torch.export and fullgraph=True leave out "
    "exact_queries."
)


def find_marked(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of marks (b, t) is True, (b, n) in order, and which of these n are such: rows may have fewer."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=COUNTED)
    elif torch.compiler.is_exporting():
        raise ValueError(COUNTED)
    n = int(marks.sum(-1).max()) if marks.numel() else 0
    index = (~marks).to(torch.int8).argsort(dim=-1, stable=True)[:, :n]
    return index, marks.gather(1, index)


def slot_row_of(how: Options, state: HybridState, keys: Keys) -> SlotRow:
    first = how.sinks + how.window
    return SlotRow(
        torch.cat([set_aside(state.k[:, :, first:])[0], keys.k], 2),
        torch.cat([set_aside(state.v[:, :, first:])[0], keys.v], 2),
        torch.cat([state.fade[:, :, first:].to(keys.birth.dtype), keys.birth], 2),
        torch.cat([state.place, keys.place[:, None].expand(-1, keys.k.shape[1], -1)], 2),
    )


def places(how: Options, keys: Keys) -> Tensor:
    """How far each new token is in its sequence, (b, t); where not causal, how far the last one is, (b, 1)."""
    return keys.place[:, -keys.real.shape[1] :] if how.causal else keys.real.sum(-1, keepdim=True) - 1


def without_spoilt(keys: Keys) -> tuple[Keys, Tensor]:
    """The keys and values with zeros for numbers that aren't finite, and which keys of the row have such, (b, g, w + t)."""
    (k, in_k), (v, in_v) = set_aside(keys.k), set_aside(keys.v)
    sinks = (x.nan_to_num(0.0, 0.0, 0.0) for x in (keys.sink_k, keys.sink_v))
    return keys._replace(k=k, v=v, **dict(zip(("sink_k", "sink_v"), sinks))), (in_k | in_v) & keys.there[:, None]


def users(how: Options, keys: Keys, state: HybridState, spoilt: Tensor, groups: int) -> Tensor:
    """Find the queries (b, h, t) that use a key which `set_aside` has changed, or such a sink or slot of the state."""
    t, w, s = keys.real.shape[1], how.window, how.sinks
    before = spoilt.cumsum(-1)[..., w:] > 0 if how.causal else spoilt.any(-1, keepdim=True)
    seen = before
    if how.feature_map is None and not how.slots:  # what has left the window is used no more, but for sinks
        count = torch.nn.functional.pad(spoilt.cumsum(-1), (1, 0))
        first = torch.arange(1, t + 1, device=spoilt.device)
        last = (first + (w if how.causal else 2 * w - 1)).clamp(max=w + t)
        sinks = spoilt[..., w:] & (keys.place[:, None, w:] < s)
        seen = (count[..., last] > count[..., first]) | (
            sinks.cumsum(-1) > 0 if how.causal else sinks.any(-1, keepdim=True)
        )
        if keys.sees_all is not None:
            seen = seen | (before & keys.sees_all[:, None])
    if s or how.slots:
        kept = (
            torch.cat([state.k[:, :, :s], state.k[:, :, s + w :]], 2),
            torch.cat([state.v[:, :, :s], state.v[:, :, s + w :]], 2),
        )
        seen = seen | (set_aside(kept[0])[1] | set_aside(kept[1])[1]).any(-1, keepdim=True)
    return (seen & keys.real[:, None]).repeat_interleave(groups, dim=1)


def state_behind(
    how: Options, before: HybridState, outputs: Outputs, keys: Keys, slot_row: SlotRow | None, spoilt: Tensor | None
) -> HybridState:
    """Return the state after the new tokens: keys as they were given, and NaN in z if one of `spoilt` has left the window."""
    state = replace(before, S=outputs.S, z=outputs.z, M=outputs.M)
    if spoilt is not None:
        w = keys.real.shape[1]
        left = spoilt[..., :w] & (keys.real & (keys.place[:, :w] >= how.sinks))[:, None]
        state = replace(state, z=marked(state.z, left.any(-1)))
    w, s = how.window, how.sinks
    count, now = state.count + keys.real.sum(-1), keys.clock[:, :, -1:]
    last = count[:, None] - 1
    room = s + torch.arange(w, device=last.device)
    place = last - (last - room).remainder(w)  # (b, w): the last token that the ring holds there
    index = (place - keys.place[:, :1]).clamp(min=0)
    empty = (place < s)[:, None, :, None]
    fade = (keys.birth + now)[..., None]
    ring_k, ring_v, ring_fade = (at(x, index).masked_fill(empty, 0.0) for x in (keys.k, keys.v, fade))
    sinks = (keys.sink_k, keys.sink_v, (keys.sink_birth + now)[..., None])
    none = (torch.arange(s, device=count.device) >= count[:, None])[:, None, :, None]
    parts = [[x.masked_fill(none, 0.0), y] for x, y in zip(sinks, (ring_k, ring_v, ring_fade))]
    score, stood = state.score, state.place
    if slot_row is not None:
        held, score = outputs.slots, outputs.score
        stood = slot_row.place.gather(2, held)
        empty = (score == -torch.inf)[..., None]
        for part, x in zip(parts, (slot_row.k, slot_row.v, (slot_row.birth + now)[..., None])):
            part.append(at(x, held).masked_fill(empty, 0.0))
    k, v, fade = (torch.cat(x, 2) for x in parts)
    return replace(state, k=k, v=v, fade=fade[..., 0].to(state.fade.dtype), score=score, place=stood, count=count)
