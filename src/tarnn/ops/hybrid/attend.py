"""Hybrid attention of rows whose real tokens stand in front: their keys, the calls that compute them, the state after them;
and of one token, in time that doesn't depend on how many came before."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from tarnn.kernels.contract import choose
from tarnn.kernels.hybrid import Call, Gradients, Outputs, Token, at, capped, room_of, weakest
from tarnn.kernels.tracing import is_untraced, known_finite
from tarnn.numerics import finite, marked, wide
from tarnn.ops.features import check_widths, raw_features
from tarnn.ops.hybrid.arguments import Options, scaled_features, scores, within
from tarnn.ops.hybrid.keys import (
    Keys,
    SlotRow,
    find_marked,
    keys_of,
    places,
    slot_row_of,
    state_behind,
    users,
    with_exact_queries,
    without_spoilt,
)
from tarnn.ops.registration import Op
from tarnn.ops.states import HybridState

PIECE = 4096  # tokens for which features are made at a time, so that few of them exist

hybrid = Op(
    "hybrid",
    Call,
    Outputs,
    Gradients,
    handed_out=("o", "share"),
    keep=lambda call, outputs, with_state: outputs._replace(S=None, z=None, M=None),
)


def new_state(how: Options, k: Tensor, v: Tensor) -> HybridState:
    """The state that has seen nothing."""
    f = 0 if how.feature_map is None else scaled_features(how, k[:, :, :1], "keys")[0].shape[-1]
    return HybridState.zeros(
        k, v, f, window=how.window, sinks=how.sinks, slots=how.slots, log_features=how.log_features
    )


def attend(how: Options, q, k, v, count, log_decay, state, state_too: bool):
    """Rows whose real tokens stand in front, `count` (b,) of them (None: all). state_too: so that gradients pass through
    the state and ρ."""
    b, t = q.shape[0], q.shape[2]
    real = torch.ones(b, t, dtype=torch.bool, device=q.device)
    if count is not None:
        real = torch.arange(t, device=q.device) < count[:, None]
        # whatever stands at what is no token: NaN too
        q, k, v = (x.masked_fill(~real[:, None, :, None], 0.0) for x in (q, k, v))
    if state is None:
        state = new_state(how, k, v)
    state.check(how, q.dtype)
    if not t:
        empty = q.sum(-1, dtype=wide(v.dtype))  # autograd sees where it comes from
        return empty[..., None].expand(-1, -1, -1, v.shape[3]).to(v.dtype), state, empty
    given = with_exact_queries(how, keys_of(how, state, k, v, real, log_decay))
    keys, spoilt, spoiled = given, None, None
    if not known_finite(given.k, given.v, state.k, state.v):
        keys, spoilt = without_spoilt(given)
        spoiled = users(how, keys, state, spoilt, q.shape[1] // k.shape[1])
    slot_row = slot_row_of(how, state, keys) if how.slots else None
    outputs = _outputs(how, q, keys, slot_row, log_decay, state, state_too)
    o, rho = outputs.o, outputs.share
    if keys.sees_all is not None:
        o, rho = _with_exact_rows(how, q, keys, o, rho)
    after = None
    if how.causal and state_too:
        after = state_behind(how, state, outputs, given, slot_row, spoilt)
    return marked(o, spoiled), after, marked(rho[..., None], spoiled)[..., 0]


def is_watched(how: Options, *given: Any) -> bool:
    """Whether autograd watches something that attention depends on."""
    if not torch.is_grad_enabled():
        return False
    parts = (how.far_bias, *given, *(how.feature_map or nn.Module()).parameters())
    return any(isinstance(x, Tensor) and x.requires_grad for x in parts)


def _outputs(
    how: Options,
    q: Tensor,
    keys: Keys,
    slot_row: SlotRow | None,
    log_decay: Tensor | None,
    state: HybridState,
    state_too: bool,
) -> Outputs:
    """Compute outputs in one call, or in pieces to save memory when neither autograd nor tracing is active."""
    t, plain = q.shape[2], is_untraced(q)
    fades = log_decay is not None or not plain or bool(state.fade.any())
    watched = is_watched(how, q, keys.k, keys.v, state.k, state.S)
    size = t
    if plain and how.causal and not how.slots and not fades and not watched:
        size = PIECE
    alone = not state_too
    pieces: list[Outputs] = []
    sums = (state.S, state.z, state.M)
    for start in range(0, t, size):
        here = slice(start, min(t, start + size))
        outputs = hybrid(call_of(how, q, keys, slot_row, state, here, sums, fades, alone))
        pieces.append(outputs)
        sums = outputs[2:5]
    if len(pieces) == 1:
        return pieces[0]
    o, share = torch.cat([x.o for x in pieces], 2), torch.cat([x.share for x in pieces], 2)
    return pieces[-1]._replace(o=o, share=share)


def call_of(
    how: Options,
    q: Tensor,
    keys: Keys,
    slot_row: SlotRow | None,
    state: HybridState,
    here: slice,
    sums: Any,
    fades: bool,
    alone: bool,
) -> Call:
    """Return the call of the new tokens `here`."""
    t, c, w = here.stop - here.start, how.slots, how.window
    row = slice(here.start, here.stop + w)
    fading: Any = (keys.clock, keys.birth, keys.sink_birth) if fades else (None, None, None)
    slots: Any = [None] * 6
    if slot_row is not None:
        score = scores(how.feature_map, keys.k, how.scale, how.softcap)
        slots = [*(x[:, :, :c] for x in slot_row[:3]), state.score, state.place, score]
    fields = (
        q[:, :, here],
        keys.k[:, :, row],
        keys.v[:, :, row],
        keys.sink_k,
        keys.sink_v,
        *_far(how, q, keys, slot_row, here, fades),
        *sums,
        state.count + here.start,
        (keys.real.sum(-1) - here.start).clamp(0, t),
        *fading,
        *slots,
        w,
        how.causal,
        how.scale,
        how.softcap or 0.0,
        how.log_features,
        alone,
    )
    return Call._make(fields)


def _far(how: Options, q: Tensor, keys: Keys, slot_row: SlotRow | None, here: slice, fades: bool) -> Any:
    """φ(q), a, φ(k) and weight of a call."""
    if how.feature_map is None:
        return None, None, None, None
    w = how.window
    phi_q, a = scaled_features(how, q[:, :, here], "queries")
    a = within(how, a, places(how, keys)[:, here] if how.causal else places(how, keys))
    if slot_row is not None:
        phi_k, weight = scaled_features(how, slot_row.k, "keys")
        check_widths(phi_q, phi_k)
        return phi_q, a, phi_k, weight
    lives = keys.there & (keys.place >= how.sinks)
    if how.causal:  # with each new token one key leaves the window
        k, enters = keys.k[:, :, here], (lives[:, : keys.real.shape[1]] & keys.real)[:, here]
    else:
        k, enters = keys.k[:, :, w:], lives[:, w:]
    phi_k, weight = scaled_features(how, k, "keys")
    check_widths(phi_q, phi_k)
    if fades and how.causal:
        weight = (weight + (keys.birth[:, :, here] + keys.clock[:, :, here])).to(weight.dtype)
    return phi_q, a, phi_k, weight.masked_fill(~enters[:, None], -torch.inf)


def _with_exact_rows(how: Options, q, keys: Keys, o, rho):
    """Compute the rows of exact queries by softmax over everything."""
    assert keys.sees_all is not None
    index, there = find_marked(keys.sees_all)  # (b, n)
    g, kind, w = keys.k.shape[1], wide(o.dtype), how.window
    k, v = keys.k[:, :, w:], keys.v[:, :, w:]
    rows = at(q, index).to(kind).unflatten(1, (g, -1))  # (b, g, r, n, d)
    logits = capped(how.scale * rows @ k.to(kind)[:, :, None].mT, how.softcap)
    seen = keys.real[:, None, None, None] & there[:, None, None, :, None]
    if how.causal:
        seen = seen & (torch.arange(k.shape[2], device=q.device) <= index[:, None, None, :, None])
        fade = (at(keys.clock[..., None], index) - keys.clock[:, :, None]).to(kind)[:, :, None]
        logits = logits + fade.masked_fill(~seen, 0.0)
    mean = _mean(logits.masked_fill(~seen, -torch.inf), v.to(kind)[:, :, None]).flatten(1, 2).to(o.dtype)
    place = index[:, None, :, None].expand_as(mean)
    o = o.scatter(2, place, torch.where(there[:, None, :, None], mean, o.gather(2, place)))
    return o, rho.masked_fill(keys.sees_all[:, None], 0.0)


def _mean(logits: Tensor, values: Tensor) -> Tensor:
    """The weighted mean of the values; of rows that see nothing: zeros."""
    weights = (logits - finite(logits.detach().amax(-1, keepdim=True))).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights @ values) / total.masked_fill(total == 0, 1.0)


# --- one token


def take_step(
    how: Options, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: HybridState, *, inplace: bool
) -> tuple[Tensor, HybridState, Tensor]:
    """Compute one real token of each row: o (b, h, 1, e), the state after it, ρ (b, h, 1)."""
    if not inplace:
        state = state.clone()
    s = state
    # e^−10⁴ is 0
    decay = None if log_decay is None else log_decay.clamp(min=-1e4).to(s.fade.dtype)
    far, slots = _token_features(how, q, s)
    constants = (how.sinks, how.window, how.scale, how.softcap or 0.0, how.log_features)
    token = Token._make((q, k, v, *far, decay, s.k, s.v, s.fade, s.count, s.S, s.z, s.M, *slots, *constants))
    outputs = choose("hybrid", token).step(token)
    if inplace:
        increment_version((s.k, s.v, s.fade, s.score, s.place, s.S, s.z, s.M, s.count))
    return outputs.o, state, outputs.share


def _token_features(how: Options, q: Tensor, state: HybridState) -> tuple[list[Any], list[Any]]:
    """φ(q), a, φ and log-scale of the key in the room that the token takes; and what slots need."""
    far: list[Any] = [None] * 4
    slots: list[Any] = [None] * 5
    if how.feature_map is None and not how.slots:
        return far, slots
    old, raw = at(state.k, room_of(state.count, how.sinks, how.window)[:, None]), None
    if how.feature_map is not None:
        raw = raw_features(how.feature_map, old, "keys")
        phi_q, a = scaled_features(how, q, "queries")
        phi_k, weight = scaled_features(how, old, "keys", raw)
        check_widths(phi_q, phi_k)
        far = [phi_q, within(how, a, state.count[:, None]), phi_k, weight]
    if how.slots:
        score = scores(how.feature_map, old, how.scale, how.softcap, raw)[..., 0]
        slots = [state.score, state.place, score, None, None]
        if how.feature_map is not None:
            last = at(state.k, how.sinks + how.window + weakest(state.score, state.place))
            slots[3:] = scaled_features(how, last, "keys")
    return far, slots
