"""Hybrid attention of rows whose real tokens stand in front: some keys exactly, all others by features.

Each key lives in exactly one store: sinks, window, slots, or sums. Time is cut into chunks of c queries. Each chunk sees
c + w − 1 keys exactly. The keys of the sums are the same keys, w positions late, so that the chunks of linear attention
work on keys and values that are delayed. Parts are merged by the logarithms of their weights, with one denominator.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.cpu.hybrid import HybridCall
from tarnn.kernels.eager.forward_pass import pair_products
from tarnn.kernels.eager.segments import CHUNK_WITH_CHANNELS
from tarnn.kernels.eager.weights import chunk_weights
from tarnn.kernels.plain import known_finite
from tarnn.numerics import default_eps, finite, marked, set_aside, wide, widest
from tarnn.ops.hybrid import compiled as hybrid_compiled
from tarnn.ops.hybrid import slots as hybrid_slots
from tarnn.ops.hybrid.compiled import scaled_features
from tarnn.ops.hybrid.state import HybridState, Keys, Options, at, capped, places, room_of, within
from tarnn.ops.units import causal_units

CHUNK = 64


class Part(NamedTuple):
    """Some of the keys as queries see them: the mean of their values, and the log of their weight (−∞: none)."""

    mean: Tensor  # (b, h, t, e)
    log_weight: Tensor  # (b, h, t)


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
    dtype = wide(v.dtype)
    real = torch.ones(b, t, dtype=torch.bool, device=q.device)
    if count is not None:
        real = torch.arange(t, device=q.device) < count[:, None]
        # whatever stands at what is no token: NaN too
        q, k, v = (x.masked_fill(~real[:, None, :, None], 0.0) for x in (q, k, v))
    if state is None:
        state = new_state(how, k, v)
    state.check(how, q.dtype)
    if not t:
        empty = q.sum(-1, dtype=dtype)  # autograd sees where it comes from
        return empty[..., None].expand(-1, -1, -1, v.shape[3]).to(v.dtype), state, empty
    given = _keys(how, state, k, v, real, log_decay)
    keys, spoilt, users = given, None, None
    if not known_finite(given.k, given.v, state.k, state.v):
        keys, spoilt = _set_aside(given)
        users = _users(how, keys, state, spoilt, q.shape[1] // k.shape[1])
    watched = hybrid_compiled.is_watched(how, q, k, v, state.k, state.S)
    if hybrid_compiled.refusal(how, q, keys, state, log_decay, watched=watched, state_too=state_too) is None:
        plain = partial(_from_features, how, keys)
        o, rho, sums = hybrid_compiled.attend(how, q, keys, state, plain, watched=watched)
        if how.exact_queries is not None:
            o, rho = _with_exact_rows(how, q, keys, o, rho)
        after = replace(state, **sums._asdict()) if how.causal else state
        after = _after(how, after, given, None, spoilt) if how.causal else None
        return marked(o, users), after, marked(rho[..., None], users)[..., 0]
    slots = _slots(how, state, keys) if how.slots else None
    parts = [_exact(how, q.to(dtype), keys, slots)]
    after = state
    if how.feature_map is not None:
        estimated, S, z, M = _far(how, q, keys, slots, state)
        parts += estimated
        after = replace(state, S=S, z=z, M=M)
    o, log_weight = _merged(parts)
    rho = torch.zeros_like(log_weight)
    if len(parts) > 1:  # in sums whose derivatives are numbers where no key is seen: logsumexp's are not
        far = parts[1].log_weight if len(parts) == 2 else _merged(parts[1:])[1]
        rho = (far - finite(log_weight)).exp()
    if how.exact_queries is not None:
        o, rho = _with_exact_rows(how, q, keys, o, rho)
    o = o.masked_fill(~real[:, None, :, None], 0.0).to(v.dtype)
    rho = rho.masked_fill(~real[:, None], 0.0)
    after = _after(how, after, given, slots, spoilt) if how.causal else None
    return marked(o, users), after, marked(rho[..., None], users)[..., 0]


def _set_aside(keys: Keys) -> tuple[Keys, Tensor]:
    """The keys and values with zeros for numbers that aren't finite, and which keys of the row have such, (b, g, w + t)."""
    (k, in_k), (v, in_v) = set_aside(keys.k), set_aside(keys.v)
    sinks = (x.nan_to_num(0.0, 0.0, 0.0) for x in (keys.sink_k, keys.sink_v))
    return keys._replace(k=k, v=v, **dict(zip(("sink_k", "sink_v"), sinks))), (in_k | in_v) & keys.there[:, None]


def _users(how: Options, keys: Keys, state: HybridState, spoilt: Tensor, groups: int) -> Tensor:
    """Which queries (b, h, t) use a key that `_set_aside` has changed, or one of the state's sinks or slots that has such."""
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
        if how.exact_queries is not None:
            exact = torch.isin(torch.arange(t, device=spoilt.device), how.exact_queries)
            seen = seen | (before & exact)
    if s or how.slots:
        kept = (
            torch.cat([state.k[:, :, :s], state.k[:, :, s + w :]], 2),
            torch.cat([state.v[:, :, :s], state.v[:, :, s + w :]], 2),
        )
        seen = seen | (set_aside(kept[0])[1] | set_aside(kept[1])[1]).any(-1, keepdim=True)
    return (seen & keys.real[:, None]).repeat_interleave(groups, dim=1)


def _from_features(how: Options, keys: Keys, call: HybridCall) -> Tensor:
    """o of a causal call that nothing came before, as the compiled kernel computes it."""
    keys = keys._replace(k=call.k, v=call.v, sink_k=call.sink_k, sink_v=call.sink_v)
    t, dtype = call.q.shape[2], wide(call.q.dtype)
    parts = [_exact(how, call.q.to(dtype), keys, None)]
    if call.phi_q is not None:
        (b, g, _, f), e = call.phi_k.shape, call.v.shape[3]
        M = call.phi_k.new_full((b, g, f) if how.log_features else (b, g), -torch.inf)
        nothing = call.phi_k.new_zeros(b, g, f, e + 1), M
        far = (call.phi_q, call.phi_k, call.v[:, :, :t], call.weight, keys.clock.to(dtype), *nothing, call.a)
        parts.append(_sweep(*far)[0])
    return _merged(parts)[0].masked_fill(~keys.real[:, None, :, None], 0.0).to(call.v.dtype)


def _keys(how: Options, state: HybridState, k, v, real, log_decay) -> Keys:
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
    ring = room_of(place[:, :w].clamp(min=s), how)
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


class _Slots(NamedTuple):
    """The keys of one row, slots before those of `Keys`, and which of them slots hold at which token."""

    k: Tensor  # (b, g, c + w + t, d)
    v: Tensor
    birth: Tensor  # (b, g, c + w + t)
    place: Tensor
    entries: Tensor  # (b, g, n, l): keys in the slots in each chunk of queries
    held: Tensor  # (b, g, n, chunk or 1, l): at which queries
    course: hybrid_slots.Course | None  # None: the slots are the same for all queries


def _slots(how: Options, state: HybridState, keys: Keys) -> _Slots:
    g, t, c = keys.k.shape[1], keys.real.shape[1], how.slots
    first = how.sinks + how.window
    row = (
        torch.cat([set_aside(state.k[:, :, first:])[0], keys.k], 2),
        torch.cat([set_aside(state.v[:, :, first:])[0], keys.v], 2),
        torch.cat([state.fade[:, :, first:].to(keys.birth.dtype), keys.birth], 2),
        torch.cat([state.place, keys.place[:, None].expand(-1, g, -1)], 2),
    )
    score = hybrid_slots.scores(how.feature_map, keys.k, how.scale, how.softcap)
    lives = keys.there & (keys.place >= how.sinks)
    if how.causal:
        leaves = lives[:, :t] & keys.real
        found = hybrid_slots.course(state.score, state.place, leaves, score[:, :, :t], CHUNK)
        return _Slots(*row, found.entries, found.held, found)
    index, there = hybrid_slots.worst(score, lives, c)
    n = -(-t // CHUNK)
    # those in the window of a query stand there already
    now = torch.arange(n * CHUNK, device=score.device).view(n, CHUNK, 1) + how.window  # in the row of `Keys`
    far = (index[:, :, None, None] - now).abs() >= how.window
    index = index[:, :, None].expand(-1, -1, n, -1)
    return _Slots(*row, index + c, far & there[:, :, None, None], None)


def _exact(how: Options, q: Tensor, keys: Keys, slots: _Slots | None) -> Part:
    """Window, sinks and slots, chunk by chunk."""
    (b, h, t, _), g, window, sinks = q.shape, keys.k.shape[1], how.window, how.sinks
    n, reach = -(-t // CHUNK), window if how.causal else 2 * window - 1
    length, r, missing = CHUNK + reach - 1, h // g, n * CHUNK - t
    q = how.scale * torch.nn.functional.pad(q, (0, 0, 0, missing)).unflatten(1, (g, r)).unflatten(3, (n, CHUNK))
    q = q.transpose(2, 3)  # (b, g, n, r, c, d)

    def windows(x: Tensor) -> Tensor:
        """(…, w + t) → (…, n, c + reach − 1): what each chunk may see."""
        x = torch.nn.functional.pad(x, (0, n * CHUNK + length - x.shape[-1] + 1))
        return x[..., 1 : n * CHUNK + length].unfold(-1, length, CHUNK)

    k, v = (windows(x.to(q.dtype).mT).permute(0, 1, 3, 2, 4) for x in (keys.k, keys.v))  # (b, g, n, d, l)
    i, j = torch.arange(CHUNK, device=q.device)[:, None], torch.arange(length, device=q.device)
    near = (j >= i) & (j < i + reach)
    near = near & windows(keys.there & (keys.place >= sinks))[:, None, :, None, None]  # (b, 1, n, 1, c, l)
    # (b, g, n, c, 1)
    clock = torch.nn.functional.pad(keys.clock, (0, missing))[..., None].unflatten(2, (n, CHUNK))
    fade = (clock + windows(keys.birth)[..., None, :])[:, :, :, None].to(q.dtype)
    logits = (capped(q @ k[:, :, :, None], how.softcap) + fade.masked_fill(~near, 0.0)).masked_fill(~near, -torch.inf)
    values = [v.mT[:, :, :, None]]
    if sinks:
        now = keys.place[:, -1:] - t + 1 + torch.arange(n * CHUNK, device=q.device)
        sink = torch.arange(sinks, device=q.device)
        seen = (
            sink <= now[..., None]
            if how.causal
            else (sink < keys.real.sum(-1)[:, None])[:, None].expand(b, n * CHUNK, -1)
        )
        seen = seen.unflatten(1, (n, CHUNK))[:, None, :, None]  # (b, 1, n, 1, c, s)
        fade = (clock + keys.sink_birth[:, :, None, None])[:, :, :, None].to(q.dtype)
        products = capped(q @ keys.sink_k.to(q.dtype)[:, :, None, None].mT, how.softcap)
        logits = torch.cat([logits, (products + fade.masked_fill(~seen, 0.0)).masked_fill(~seen, -torch.inf)], -1)
        values.append(keys.sink_v.to(q.dtype)[:, :, None, None].expand(-1, -1, n, -1, -1, -1))
    if slots is not None:
        held = slots.held[:, :, :, None]  # (b, g, n, 1, c, l)
        index = slots.entries.flatten(2)
        shape = slots.entries.shape[2:]
        slot_k, slot_v = (at(x, index).to(q.dtype).unflatten(2, shape)[:, :, :, None] for x in (slots.k, slots.v))
        birth = slots.birth.gather(2, index).unflatten(2, shape)[..., None, :]
        fade = (clock + birth)[:, :, :, None].to(q.dtype).masked_fill(~held, 0.0)
        products = capped(q @ slot_k.mT, how.softcap)
        logits = torch.cat([logits, (products + fade).masked_fill(~held, -torch.inf)], -1)
        values.append(slot_v)
    mean, weight = _softmax(logits, torch.cat(values, dim=-2))
    return Part(*(x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t] for x in (mean, weight)))


def _softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of the values, log of the sum); rows that see nothing: zeros, −∞."""
    most = finite(logits.detach().amax(-1, keepdim=True))
    weights = (logits - most).exp()
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    mean = (weights @ values) / total.masked_fill(none, 1.0)
    return mean, torch.where(none, -torch.inf, total.masked_fill(none, 1.0).log() + most).squeeze(-1)


def _merged(parts: list[Part]) -> tuple[Tensor, Tensor]:
    """One denominator for all parts: (o, ℓ)."""
    logits = torch.stack([x.log_weight for x in parts], dim=-1)  # (b, h, t, parts)
    o, log_weight = _softmax(logits[..., None, :], torch.stack([x.mean for x in parts], dim=-2))
    return o.squeeze(-2), log_weight.squeeze(-1)


def _far(how: Options, q, keys: Keys, slots: _Slots | None, state: HybridState):
    """The keys beyond the window, estimated: a part for those before, where not causal one for those behind; and S, z, M."""
    t, window = q.shape[2], how.window
    assert how.feature_map is not None
    lives = (keys.there & (keys.place >= how.sinks))[:, None]
    enters = lives[:, :, :t] & keys.real[:, None]  # with each new token one key leaves the window
    if slots is None or slots.course is None:
        if slots is not None:
            lives = lives.expand(-1, keys.k.shape[1], -1).scatter(2, slots.entries[:, :, 0] - how.slots, False)
            enters = enters & lives[:, :, :t]
        k, v, birth = keys.k, keys.v, keys.birth
        first_k, first_v, first_birth = k[:, :, :t], v[:, :, :t], birth[:, :, :t]
    else:  # or, in its place, a key that it drove out of the slots
        loser, enters = slots.course.loser, slots.course.loses
        k, v, birth = keys.k, keys.v, keys.birth
        first_k, first_v, first_birth = at(slots.k, loser), at(slots.v, loser), slots.birth.gather(2, loser)
    kind = wide(q.dtype)
    decay = keys.clock.diff(dim=-1, prepend=keys.clock.new_zeros(*keys.clock.shape[:2], 1)).to(kind)
    sums = torch.cat([state.S, state.z[..., None]], -1)
    phi_q, a = scaled_features(how, q, "queries")
    a = within(how, a, places(how, keys))

    def sweep(phi_q, k, v, w, sums, M, a):
        phi_k, weight = scaled_features(how, k, "keys")
        return _sweep(phi_q, phi_k, v, (weight + w).to(kind), decay, sums, M, a)

    w = (first_birth + keys.clock).masked_fill(~enters, -torch.inf)
    before, sums, M = sweep(phi_q, first_k, first_v, w, sums, state.M, a)
    if how.causal:
        return [before], sums[..., :-1], sums[..., -1], M

    def turned(x: Tensor) -> Tensor:
        """From the end to the start: at token i key i + w joins."""
        return torch.nn.functional.pad(x[:, :, window:].flip(2), (0, 0, window, 0))[:, :, :t]

    w = birth[:, :, window:].masked_fill(~lives[:, :, window:], -torch.inf).flip(2)
    w = torch.nn.functional.pad(w, (window, 0), value=-torch.inf)[:, :, :t]
    nothing = torch.zeros_like(sums), torch.full_like(state.M, -torch.inf)
    after, _, _ = sweep(phi_q.flip(2), turned(k), turned(v), w, *nothing, a.flip(2))
    return [before, Part(after.mean.flip(2), after.log_weight.flip(2))], state.S, state.z, state.M


def _sweep(phi_q, phi_k, v, w, decay, sums, M, a):
    """Causal linear attention by chunks, weights with their scale: (the part, S' behind, M behind).

    With M (b, g, f) phi_q and phi_k are logarithms.
    """
    t, g = phi_q.shape[2], phi_k.shape[1]
    by_feature, decay = M.ndim == 3, decay[..., None]
    if by_feature:
        phi_q, phi_k, decay, U, M = causal_units(phi_q, phi_k + w[..., None], decay, M)
        a = a + U
    c = min(CHUNK_WITH_CHANNELS if by_feature else CHUNK, t)
    n = -(-t // c)
    missing = n * c - t

    def chunked(x: Tensor, value: float = 0.0) -> Tensor:
        pad = (0, 0) * (x.ndim - 3) + (0, missing)
        return torch.nn.functional.pad(x, pad, value=value).unflatten(2, (n, c))

    phi_q = chunked(phi_q).unflatten(1, (g, -1)).transpose(2, 3)  # (b, g, n, r, c, f)
    phi_k, value = chunked(phi_k.to(phi_q.dtype)), chunked(v.to(phi_q.dtype))
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    weights = chunk_weights(chunked(decay), None if by_feature else chunked(w, -torch.inf), M)
    entered = (phi_k * weights.key).mT @ value  # (b, g, n, f, e + 1)
    before = []
    for i in range(n):
        before.append(sums)
        sums = weights.keep[:, :, i, :, None] * sums + entered[:, :, i]
    pairs = pair_products(phi_q, phi_k, weights.pair)
    from_before = (phi_q * weights.query[:, :, :, None]) @ torch.stack(before, 2)[:, :, :, None]
    found = pairs @ value[:, :, :, None] + from_before
    found = found.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t]
    if not by_feature:
        unit = weights.M[:, :, :, None].expand(*weights.M.shape[:3], phi_q.shape[3], c)
        a, M = a + unit.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t], weights.M_out
    num, den = found[..., :-1], found[..., -1]
    none = den <= default_eps(den.dtype)  # smaller ones would have infinite gradients
    safe = den.masked_fill(none, 1.0)
    return Part(num / safe[..., None], torch.where(none, -torch.inf, safe.log() + a)), sums, M


def _with_exact_rows(how: Options, q, keys: Keys, o, rho):
    """The rows of `exact_queries` by softmax over everything."""
    assert how.exact_queries is not None
    rows_at = how.exact_queries[how.exact_queries < q.shape[2]]
    g, dtype, real, w = keys.k.shape[1], o.dtype, keys.real, how.window
    k, v = keys.k[:, :, w:], keys.v[:, :, w:]
    rows = q[:, :, rows_at].to(dtype).unflatten(1, (g, -1))  # (b, g, r, n, d)
    logits = capped(how.scale * rows @ k.to(dtype)[:, :, None].mT, how.softcap)
    seen = real[:, None, None, None] & real[:, rows_at][:, None, None, :, None]
    if how.causal:
        seen = seen & (torch.arange(k.shape[2], device=q.device) <= rows_at[:, None])
        fade = (keys.clock[:, :, rows_at, None] - keys.clock[:, :, None]).to(dtype)[:, :, None]
        logits = logits + fade.masked_fill(~seen, 0.0)
    mean, _ = _softmax(logits.masked_fill(~seen, -torch.inf), v.to(dtype)[:, :, None])
    return o.index_copy(2, rows_at, mean.flatten(1, 2)), rho.index_fill(2, rows_at, 0.0)


def _after(how: Options, state: HybridState, keys: Keys, slots: _Slots | None, spoilt: Tensor | None) -> HybridState:
    """The state behind the new tokens: keys as they were given, and NaN in z where one of `spoilt` has left the window."""
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
    if slots is not None and slots.course is not None:
        held, score = slots.course.slots, slots.course.score
        stood = slots.place.gather(2, held)
        empty = (score == -torch.inf)[..., None]
        for part, x in zip(parts, (slots.k, slots.v, (slots.birth + now)[..., None])):
            part.append(at(x, held).masked_fill(empty, 0.0))
    k, v, fade = (torch.cat(x, 2) for x in parts)
    return replace(state, k=k, v=v, fade=fade[..., 0].to(state.fade.dtype), score=score, place=stood, count=count)
