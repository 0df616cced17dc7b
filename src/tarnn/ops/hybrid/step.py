"""One token of hybrid attention: its time and the size of its state don't depend on how many came before."""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.numerics import finite, wide
from tarnn.ops.hybrid import compiled as hybrid_compiled
from tarnn.ops.hybrid import slots as hybrid_slots
from tarnn.ops.hybrid.compiled import scaled_features
from tarnn.ops.hybrid.state import HybridState, Options, capped, room_of, within


def take_step(
    how: Options, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: HybridState, *, inplace: bool
) -> tuple[Tensor, HybridState, Tensor]:
    """One real token of each row: o (b, h, 1, e), the state behind it, ρ (b, h, 1)."""
    if not inplace:
        state = state.clone()
    if hybrid_compiled.step_refusal(how, q, state) is None:
        o, rho = hybrid_compiled.step(how, q, k, v, log_decay, room_of(state.count, how), state)
        if inplace:
            increment_version(_written(state))
        return o, state, rho
    if log_decay is not None:  # e^−10⁴ is 0
        decay = log_decay[..., 0].clamp(min=-1e4).to(state.fade.dtype)
        state.fade.add_(decay[..., None] * _filled(how, state))
        state.M.add_(decay[..., None] if how.log_features else decay)
    _make_room(how, k, v, state)
    o, rho = _read(how, q, v.dtype, state)
    if inplace:
        increment_version(_written(state))
    return o, state, rho


def _written(s: HybridState) -> tuple[Tensor, ...]:
    return s.k, s.v, s.fade, s.score, s.place, s.S, s.z, s.M, s.count


def _make_room(how: Options, k: Tensor, v: Tensor, state: HybridState) -> None:
    """The token into the ring or among the sinks. The key that stood there goes to a slot or into the sums."""
    row, near = torch.arange(k.shape[0], device=k.device), how.sinks + how.window
    room, full = room_of(state.count, how), state.count >= near
    leaves = full[:, None].expand(state.z.shape[:2])
    old = state.k[row, :, room], state.v[row, :, room], state.fade[row, :, room]
    if how.slots:
        old, leaves = _through_slots(how, state, old, state.count - how.window, leaves, near)
    if how.feature_map is not None:
        _add(how, state, *old, leaves)
    for x, new in ((state.k, k[:, :, 0]), (state.v, v[:, :, 0]), (state.fade, state.fade.new_zeros(()))):
        x[row, :, room] = new.to(x.dtype)
    state.count.add_(1)


def _through_slots(how: Options, state: HybridState, old, place: Tensor, leaves: Tensor, first: int):
    """A key that leaves the window against the slots: the loser, and whether there is one."""
    score = hybrid_slots.scores(how.feature_map, old[0][:, :, None], how.scale, how.softcap)[..., 0]
    least = state.score.amin(-1, keepdim=True)
    last = state.place.masked_fill(state.score > least, -2).argmax(-1, keepdim=True)  # of equal ones the last loses
    wins = leaves & (score > least[..., 0])
    loses = leaves & ~(wins & (least[..., 0] == -torch.inf))
    losers = []
    for x, new in zip((state.k, state.v, state.fade[..., None]), (*old[:2], old[2][..., None])):
        index, chosen = (first + last)[..., None].expand(-1, -1, 1, x.shape[3]), wins[..., None]
        before = x.gather(2, index)[:, :, 0]
        losers.append(torch.where(chosen, before, new))
        x.scatter_(2, index, torch.where(chosen, new, before)[:, :, None])
    for x, new in ((state.score, score), (state.place, place[:, None].expand_as(score))):
        x.scatter_(2, last, torch.where(wins, new.to(x.dtype), x.gather(2, last)[..., 0])[..., None])
    return (losers[0], losers[1], losers[2][..., 0]), loses


def _add(how: Options, state: HybridState, k: Tensor, v: Tensor, fade: Tensor, enters: Tensor) -> None:
    """A key and value (b, g, ·) into the sums, where `enters` (b, g)."""
    phi, w = (x[:, :, 0] for x in scaled_features(how, k[:, :, None], "keys"))  # (b, g, f), (b, g)
    w = (w + fade).masked_fill(~enters, -torch.inf)[..., None]
    if how.log_features:
        phi, w = torch.ones_like(phi), phi + w
    before = state.M if how.log_features else state.M[..., None]  # (b, g, f or 1)
    M = torch.maximum(before, w).detach()
    keep, phi = (before - finite(M)).exp(), phi * (w - finite(M)).exp()
    state.S.mul_(keep[..., None]).add_(phi[..., None] * v[:, :, None].to(phi.dtype))
    state.z.mul_(keep).add_(phi)
    state.M.copy_(M.view_as(state.M))


def _filled(how: Options, state: HybridState) -> Tensor:
    """Which room of the store holds a key, (b, g, s + w + c)."""
    near = torch.arange(how.sinks + how.window, device=state.k.device) < state.count[:, None]
    near = near[:, None].expand(-1, state.k.shape[1], -1)
    return torch.cat([near, state.score > -torch.inf], -1) if how.slots else near


def _read(how: Options, q: Tensor, dtype: torch.dtype, state: HybridState) -> tuple[Tensor, Tensor]:
    """o and ρ of the token that was written last."""
    g, kind = state.k.shape[1], wide(dtype)
    logits = capped(how.scale * q.to(kind).reshape(q.shape[0], g, -1, q.shape[3]) @ state.k.to(kind).mT, how.softcap)
    filled = _filled(how, state)[:, :, None]
    logits = (logits + state.fade[:, :, None]).masked_fill(~filled, -torch.inf)  # (b, g, r, s + w + c)
    most = logits.detach().amax(-1, keepdim=True)
    if how.feature_map is None:
        weights = (logits - most).exp()
        o = (weights @ state.v.to(kind)) / weights.sum(-1, keepdim=True)
        return o.reshape(*q.shape[:3], -1).to(dtype), torch.zeros_like(q[..., 0], dtype=kind)
    phi, a = scaled_features(how, q, "queries")
    a = within(how, a, state.count[:, None] - 1)
    phi, a = phi.reshape(*logits.shape[:3], -1), a.reshape(logits.shape[:3])
    unit = state.M[:, :, None]  # (b, g, 1), or (b, g, 1, f)
    if how.log_features:
        logs = phi + unit
        unit = logs.detach().amax(-1)  # −∞: no key yet
        phi = (logs - finite(unit)[..., None]).exp()
    unit = (a + unit)[..., None]
    most = torch.maximum(most, unit.detach())
    near_weights, far_weight = (logits - most).exp(), (unit - most).exp()
    far = far_weight * (phi @ state.z[..., None])
    total = near_weights.sum(-1, keepdim=True) + far
    o = (near_weights @ state.v.to(kind) + far_weight * (phi @ state.S)) / total
    return o.reshape(*q.shape[:3], -1).to(dtype), (far / total).reshape(q.shape[:3])
