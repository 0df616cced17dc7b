"""Hybrid attention of a call in plain PyTorch: some keys exactly, all others by features.

Each key lives in exactly one store: sinks, window, slots, or sums. Time is cut into chunks of c queries. Each chunk sees
c + w − 1 keys exactly. The keys of the sums are the same keys, w positions late, so that the chunks of linear attention
work on keys and values that are delayed. Parts are merged by the logarithms of their weights, with one denominator.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.eager import refusal as refusal
from tarnn.kernels.eager.forward_pass import pair_products
from tarnn.kernels.eager.hybrid_step import step
from tarnn.kernels.eager.segments import CHUNK_WITH_CHANNELS, chunk_weights
from tarnn.kernels.eager.slots import Course, course, worst
from tarnn.kernels.hybrid import Call, Outputs, at, capped
from tarnn.log_features import causal_units
from tarnn.numerics import default_eps, finite, wide, widest

__all__ = ["forward", "refusal", "step"]

CHUNK = 64


class _Row(NamedTuple):
    """Where the keys of a call stand: the window before, then the new ones."""

    place: Tensor  # (b, w + t) in its sequence; below 0: none
    lives: Tensor  # (b, w + t)  whether there is a key that is no sink
    real: Tensor  # (b, t)
    clock: Tensor  # (b, g, t) and the others as in the call, 0 where nothing fades
    birth: Tensor
    sink_birth: Tensor


class _Slots(NamedTuple):
    """The keys of one row, slots before those of the call, and which of them slots hold at which token."""

    k: Tensor  # (b, g, c + w + t, d)
    v: Tensor
    birth: Tensor  # (b, g, c + w + t)
    entries: Tensor  # (b, g, n, l): keys in the slots in each chunk of queries
    held: Tensor  # (b, g, n, chunk or 1, l): at which queries
    course: Course | None  # None: the slots are the same for all queries


class _Part(NamedTuple):
    """Some of the keys as queries see them: the mean of their values, and the log of their weight (−∞: none)."""

    mean: Tensor  # (b, h, t, e)
    log_weight: Tensor  # (b, h, t)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    row = _row(call)
    slots = None if call.score is None else _slots(call, row)
    parts = [_exact(call, row, slots)]
    sums = call.S, call.z, call.M
    if call.phi_q is not None:
        estimated, sums = _far(call, row, slots)
        parts += estimated
    o, share = _outputs(call, row, parts)
    if slots is None or slots.course is None:
        return Outputs(o, share, *sums)
    return Outputs(o, share, *sums, slots=slots.course.slots, score=slots.course.score)


def _outputs(call: Call, row: _Row, parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """o and ρ of parts, the first of which are exact keys."""
    o, log_weight = _merged(parts)
    share = torch.zeros_like(log_weight)
    if len(parts) > 1:  # in sums whose derivatives are numbers where no key is seen: logsumexp's are not
        far = parts[1].log_weight if len(parts) == 2 else _merged(parts[1:])[1]
        share = (far - finite(log_weight)).exp()
    o = o.masked_fill(~row.real[:, None, :, None], 0.0).to(call.v.dtype)
    return o, share.masked_fill(~row.real[:, None], 0.0)


def _row(call: Call) -> _Row:
    (b, g, length, _), w, s = call.k.shape, call.window, call.sink_k.shape[2]
    t, device = length - w, call.k.device
    place = call.seen[:, None] - w + torch.arange(length, device=device)
    real = torch.arange(t, device=device) < call.length[:, None]
    lives = torch.cat([place[:, :w] >= s, real], 1) & (place >= s)
    fading = call.clock, call.birth, call.sink_birth
    kind = widest(device)
    still = (torch.zeros(b, g, n, dtype=kind, device=device) for n in (t, length, s))
    return _Row(place, lives, real, *(x if y is None else y for x, y in zip(still, fading)))


def _slots(call: Call, row: _Row) -> _Slots:
    before: Any = (call.slot_k, call.slot_v, call.slot_birth, call.slot_score, call.slot_place)
    k, v, birth, score, place = before
    new: Any = call.score
    t, c = call.q.shape[2], score.shape[2]
    keys = torch.cat([k, call.k], 2), torch.cat([v, call.v], 2), torch.cat([birth.to(row.birth.dtype), row.birth], 2)
    if call.causal:
        steps = course(score, place, row.lives[:, :t] & row.real, new[:, :, :t], CHUNK)
        return _Slots(*keys, steps.entries, steps.held, steps)
    index, there = worst(new, row.lives, c)
    n = -(-t // CHUNK)
    # those in the window of a query stand there already
    now = torch.arange(n * CHUNK, device=index.device).view(n, CHUNK, 1) + call.window  # in the row of the call
    far = (index[:, :, None, None] - now).abs() >= call.window
    index = index[:, :, None].expand(-1, -1, n, -1)
    return _Slots(*keys, index + c, far & there[:, :, None, None], None)


def _exact(call: Call, row: _Row, slots: _Slots | None) -> _Part:
    """Window, sinks and slots, chunk by chunk."""
    (b, h, t, _), g, window, sinks = call.q.shape, call.k.shape[1], call.window, call.sink_k.shape[2]
    n, reach = -(-t // CHUNK), window if call.causal else 2 * window - 1
    length, r, missing = CHUNK + reach - 1, h // g, n * CHUNK - t
    q = call.q.to(wide(call.v.dtype))
    q = call.scale * pad(q, (0, 0, 0, missing)).unflatten(1, (g, r)).unflatten(3, (n, CHUNK))
    q = q.transpose(2, 3)  # (b, g, n, r, c, d)

    def windows(x: Tensor) -> Tensor:
        """(…, w + t) → (…, n, c + reach − 1): what each chunk may see."""
        x = pad(x, (0, n * CHUNK + length - x.shape[-1] + 1))
        return x[..., 1 : n * CHUNK + length].unfold(-1, length, CHUNK)

    k, v = (windows(x.to(q.dtype).mT).permute(0, 1, 3, 2, 4) for x in (call.k, call.v))  # (b, g, n, d, l)
    i, j = torch.arange(CHUNK, device=q.device)[:, None], torch.arange(length, device=q.device)
    near = (j >= i) & (j < i + reach)
    near = near & windows(row.lives)[:, None, :, None, None]  # (b, 1, n, 1, c, l)
    clock = pad(row.clock, (0, missing))[..., None].unflatten(2, (n, CHUNK))  # (b, g, n, c, 1)
    fade = (clock + windows(row.birth)[..., None, :])[:, :, :, None].to(q.dtype)
    logits = (capped(q @ k[:, :, :, None], call.softcap) + fade.masked_fill(~near, 0.0)).masked_fill(~near, -torch.inf)
    values = [v.mT[:, :, :, None]]
    if sinks:
        now = row.place[:, -1:] - t + 1 + torch.arange(n * CHUNK, device=q.device)
        sink = torch.arange(sinks, device=q.device)
        there = row.real.sum(-1)
        seen = sink <= now[..., None] if call.causal else (sink < there[:, None])[:, None].expand(b, n * CHUNK, -1)
        seen = seen.unflatten(1, (n, CHUNK))[:, None, :, None]  # (b, 1, n, 1, c, s)
        fade = (clock + row.sink_birth[:, :, None, None])[:, :, :, None].to(q.dtype)
        products = capped(q @ call.sink_k.to(q.dtype)[:, :, None, None].mT, call.softcap)
        logits = torch.cat([logits, (products + fade.masked_fill(~seen, 0.0)).masked_fill(~seen, -torch.inf)], -1)
        values.append(call.sink_v.to(q.dtype)[:, :, None, None].expand(-1, -1, n, -1, -1, -1))
    if slots is not None:
        held = slots.held[:, :, :, None]  # (b, g, n, 1, c, l)
        index, shape = slots.entries.flatten(2), slots.entries.shape[2:]
        slot_k, slot_v = (at(x, index).to(q.dtype).unflatten(2, shape)[:, :, :, None] for x in (slots.k, slots.v))
        birth = slots.birth.gather(2, index).unflatten(2, shape)[..., None, :]
        fade = (clock + birth)[:, :, :, None].to(q.dtype).masked_fill(~held, 0.0)
        products = capped(q @ slot_k.mT, call.softcap)
        logits = torch.cat([logits, (products + fade).masked_fill(~held, -torch.inf)], -1)
        values.append(slot_v)
    mean, weight = softmax(logits, torch.cat(values, dim=-2))
    return _Part(*(x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t] for x in (mean, weight)))


def softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of the values, log of the sum); rows that see nothing: zeros, −∞."""
    most = finite(logits.detach().amax(-1, keepdim=True))
    weights = (logits - most).exp()
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    mean = (weights @ values) / total.masked_fill(none, 1.0)
    return mean, torch.where(none, -torch.inf, total.masked_fill(none, 1.0).log() + most).squeeze(-1)


def _merged(parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """One denominator for all parts: (o, ℓ)."""
    logits = torch.stack([x.log_weight for x in parts], dim=-1)  # (b, h, t, parts)
    o, log_weight = softmax(logits[..., None, :], torch.stack([x.mean for x in parts], dim=-2))
    return o.squeeze(-2), log_weight.squeeze(-1)


def _far(call: Call, row: _Row, slots: _Slots | None) -> tuple[list[_Part], tuple[Tensor, Tensor, Tensor]]:
    """Estimate the keys beyond the window: a part for those before, where not causal one for those after; and S, z, M."""
    features: Any = (call.phi_q, call.a, call.phi_k, call.weight)
    phi_q, a, phi_k, weight = features
    t, w, kind = call.q.shape[2], call.window, wide(call.q.dtype)
    v = call.v[:, :, :t]
    if (
        slots is not None and slots.course is not None
    ):  # keys that leave the window, or that such ones drive out of the slots
        loser, loses = slots.course.loser, slots.course.loses
        fade = (slots.birth.gather(2, loser) + row.clock).masked_fill(~loses, -torch.inf)
        phi_k, v, weight = at(phi_k, loser), at(slots.v, loser), (weight.gather(2, loser) + fade).to(kind)
    elif slots is not None:
        in_slots = torch.zeros_like(weight, dtype=torch.bool).scatter(2, slots.entries[:, :, 0], True)
        phi_k, weight = phi_k[:, :, -t:], weight.masked_fill(in_slots, -torch.inf)[:, :, -t:]
        weight = weight.masked_fill(~row.lives[:, None, w:], -torch.inf)
    decay = row.clock.diff(dim=-1, prepend=row.clock.new_zeros(*row.clock.shape[:2], 1)).to(kind)
    sums = torch.cat([call.S, call.z[..., None]], -1), call.M
    if call.causal:
        part, behind, M = _sweep(phi_q, phi_k, v, weight, decay, *sums, a)
        return [part], (behind[..., :-1], behind[..., -1], M)

    def late(x: Tensor, value: float = 0.0) -> Tensor:
        """At token i what was at i − w."""
        return pad(x, (*(0, 0) * (x.ndim - 3), w, 0), value=value)[:, :, :t]

    nothing = torch.zeros_like(sums[0]), torch.full_like(call.M, -torch.inf)
    before, _, _ = _sweep(phi_q, late(phi_k), v, late(weight, -torch.inf), decay, *nothing, a)
    turned = late(phi_k.flip(2)), late(call.v[:, :, w:].flip(2)), late(weight.flip(2), -torch.inf)
    after, _, _ = _sweep(phi_q.flip(2), *turned, decay, *nothing, a.flip(2))
    return [before, _Part(after.mean.flip(2), after.log_weight.flip(2))], (call.S, call.z, call.M)


def _sweep(phi_q, phi_k, v, w, decay, sums, M, a) -> tuple[_Part, Tensor, Tensor]:
    """Causal linear attention by chunks, weights with their scale: (the part, S' after, M after).

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
        return pad(x, (*(0, 0) * (x.ndim - 3), 0, missing), value=value).unflatten(2, (n, c))

    phi_q = chunked(phi_q).unflatten(1, (g, -1)).transpose(2, 3)  # (b, g, n, r, c, f)
    phi_k, value = chunked(phi_k.to(phi_q.dtype)), chunked(v.to(phi_q.dtype))
    value = pad(value, (0, 1), value=1.0)
    weights: Any = chunk_weights(chunked(decay), None if by_feature else chunked(w, -torch.inf), M)
    entered = (phi_k * weights.key).mT @ value  # (b, g, n, f, e + 1)
    before = []
    for i in range(n):
        before.append(sums)
        sums = weights.keep[:, :, i, :, None] * sums + entered[:, :, i]
    pairs = pair_products(phi_q, phi_k, weights.pair)
    from_before = (phi_q * weights.query[:, :, :, None]) @ torch.stack(before, 2)[:, :, :, None]
    outputs = (pairs @ value[:, :, :, None] + from_before).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t]
    if not by_feature:
        unit = weights.M[:, :, :, None].expand(*weights.M.shape[:3], phi_q.shape[3], c)
        a, M = a + unit.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :t], weights.M_out
    num, den = outputs[..., :-1], outputs[..., -1]
    none = den <= default_eps(den.dtype)  # smaller ones would have infinite gradients
    safe = den.masked_fill(none, 1.0)
    return _Part(num / safe[..., None], torch.where(none, -torch.inf, safe.log() + a)), sums, M
