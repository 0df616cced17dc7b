"""One token of hybrid attention in plain PyTorch: its time doesn't depend on how many came before."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.hybrid import Outputs, Token, capped, room_of, weakest
from tarnn.numerics import finite, wide


def step(token: Token) -> Outputs:
    """o (b, h, 1, e) and ρ (b, h, 1). The token is written into the state in place."""
    if token.decay is not None:
        token.fade.add_(token.decay * _filled(token))
        token.M.add_(token.decay if token.log_features else token.decay[..., 0])
    _make_room(token)
    o, share = _read(token)
    return Outputs(o, share, token.S, token.z, token.M)


def _make_room(token: Token) -> None:
    """The token into the ring or among the sinks. The key that stood there goes to a slot or into the sums."""
    rows = torch.arange(token.k.shape[0], device=token.k.device)
    room, full = room_of(token.seen, token.sinks, token.window), token.seen >= token.sinks + token.window
    leaves = full[:, None].expand(token.z.shape[:2])
    store = (token.store_k, token.store_v, token.fade)
    old: Any = [x[rows, :, room] for x in store]
    phi, weight = token.phi_k, token.weight
    if token.slot_score is not None:
        old, phi, weight, leaves = _through_slots(token, old, leaves)
    if phi is not None and weight is not None:
        _add(token, phi[:, :, 0], weight[:, :, 0], old[1], old[2], leaves)
    for x, new in zip(store, (token.k[:, :, 0], token.v[:, :, 0], token.fade.new_zeros(()))):
        x[rows, :, room] = new.to(x.dtype)
    token.seen.add_(1)


def _through_slots(token: Token, old: list[Tensor], leaves: Tensor):
    """A key that leaves the window against the slots: the loser, its features and log-scale, and whether there is one."""
    slot_score: Any
    place: Any
    score: Any
    slot_score, place, score = token.slot_score, token.slot_place, token.score
    least = slot_score.amin(-1, keepdim=True)
    last = weakest(slot_score, place)
    wins = leaves & (score > least[..., 0])
    loses = leaves & ~(wins & (least[..., 0] == -torch.inf))
    losers = []
    index = token.sinks + token.window + last
    for x, new in zip((token.store_k, token.store_v, token.fade[..., None]), (*old[:2], old[2][..., None])):
        entries, chosen = index[..., None].expand(-1, -1, 1, x.shape[3]), wins[..., None]
        before = x.gather(2, entries)[:, :, 0]
        losers.append(torch.where(chosen, before, new))
        x.scatter_(2, entries, torch.where(chosen, new, before)[:, :, None])
    came = (token.seen - token.window)[:, None].expand_as(score)
    for x, new in ((slot_score, score), (place, came)):
        x.scatter_(2, last, torch.where(wins, new.to(x.dtype), x.gather(2, last)[..., 0])[..., None])
    phi, weight = token.phi_k, token.weight
    if phi is not None and weight is not None and token.slot_phi is not None and token.slot_weight is not None:
        phi = torch.where(wins[..., None, None], token.slot_phi, phi)
        weight = torch.where(wins[..., None], token.slot_weight, weight)
    return (losers[0], losers[1], losers[2][..., 0]), phi, weight, loses


def _add(token: Token, phi: Tensor, w: Tensor, v: Tensor, fade: Tensor, enters: Tensor) -> None:
    """A key's features (b, g, f) and value (b, g, e) into the sums, where `enters` (b, g)."""
    w = (w + fade).masked_fill(~enters, -torch.inf)[..., None]
    if token.log_features:
        phi, w = torch.ones_like(phi), phi + w
    before = token.M if token.log_features else token.M[..., None]  # (b, g, f or 1)
    M = torch.maximum(before, w).detach()
    keep, phi = (before - finite(M)).exp(), phi * (w - finite(M)).exp()
    token.S.mul_(keep[..., None]).add_(phi[..., None] * v[:, :, None].to(phi.dtype))
    token.z.mul_(keep).add_(phi)
    token.M.copy_(M.view_as(token.M))


def _filled(token: Token) -> Tensor:
    """Which room of the store holds a key, (b, g, s + w + c)."""
    near = torch.arange(token.sinks + token.window, device=token.k.device) < token.seen[:, None]
    near = near[:, None].expand(-1, token.k.shape[1], -1)
    return near if token.slot_score is None else torch.cat([near, token.slot_score > -torch.inf], -1)


def _read(token: Token) -> tuple[Tensor, Tensor]:
    """o and ρ of the token that was written last."""
    q, g, dtype = token.q, token.k.shape[1], token.v.dtype
    kind = wide(dtype)
    products = token.scale * q.to(kind).reshape(q.shape[0], g, q.shape[1] // g, q.shape[3]) @ token.store_k.to(kind).mT
    logits = capped(products, token.softcap) + token.fade[:, :, None]
    logits = logits.masked_fill(~_filled(token)[:, :, None], -torch.inf)  # (b, g, r, s + w + c)
    most = logits.detach().amax(-1, keepdim=True)
    if token.phi_q is None or token.a is None:
        weights = (logits - most).exp()
        o = (weights @ token.store_v.to(kind)) / weights.sum(-1, keepdim=True)
        return o.reshape(*q.shape[:3], o.shape[-1]).to(dtype), torch.zeros_like(q[..., 0], dtype=kind)
    phi, a = token.phi_q.reshape(*logits.shape[:3], token.phi_q.shape[-1]), token.a.reshape(logits.shape[:3])
    unit = token.M[:, :, None]  # (b, g, 1), or (b, g, 1, f)
    if token.log_features:
        logs = phi + unit
        unit = logs.detach().amax(-1)  # −∞: no key yet
        phi = (logs - finite(unit)[..., None]).exp()
    unit = (a + unit)[..., None]
    most = torch.maximum(most, unit.detach())
    near_weights, far_weight = (logits - most).exp(), (unit - most).exp()
    far = far_weight * (phi @ token.z[..., None])
    total = near_weights.sum(-1, keepdim=True) + far
    o = (near_weights @ token.store_v.to(kind) + far_weight * (phi @ token.S)) / total
    return o.reshape(*q.shape[:3], o.shape[-1]).to(dtype), (far / total).reshape(q.shape[:3])
