"""What has left the windows of stretches that follow one another, made into what has left that of them all."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.hybrid import at
from tarnn.numerics import finite
from tarnn.ops.hybrid.arguments import Options, scaled_features
from tarnn.ops.hybrid.state import HybridState


class Far(NamedTuple):
    """The keys of a `HybridState` that have left the window: in the slots, and as sums in units of e^M."""

    S: Tensor
    z: Tensor
    M: Tensor
    k: Tensor  # (b, g, c, d)
    v: Tensor
    fade: Tensor  # (b, g, c)
    score: Tensor
    place: Tensor


def far_of(how: Options, state: HybridState) -> Far:
    first = how.sinks + how.window
    slots = state.k[:, :, first:], state.v[:, :, first:], state.fade[:, :, first:]
    return Far(state.S, state.z, state.M, *slots, state.score, state.place)


def with_far(how: Options, state: HybridState, far: Far) -> HybridState:
    first = how.sinks + how.window
    k, v, fade = (
        torch.cat([x[:, :, :first], y.to(x.dtype)], 2)
        for x, y in ((state.k, far.k), (state.v, far.v), (state.fade, far.fade))
    )
    return replace(state, k=k, v=v, fade=fade, score=far.score, place=far.place, S=far.S, z=far.z, M=far.M)


def without_far(how: Options, state: HybridState) -> HybridState:
    """The state as if no key had left the window."""
    far = Far(*[torch.zeros_like(x) for x in far_of(how, state)])
    nothing = {name: torch.full_like(x, -torch.inf) for name, x in (("M", far.M), ("score", far.score))}
    return with_far(how, state, far._replace(place=far.place - 1, **nothing))


def folded(how: Options, before: Far, part: Far, decay: Tensor) -> Far:
    """What has left the window behind a stretch, of which `part` did so in it. decay (b, g): of what was there before.

    The slots hold the keys of the highest scores of both, of equal ones the earlier; all others enter the sums.
    """
    sums = added(before[:3], decay, part[:3])
    if not how.slots:
        return part._replace(**dict(zip(Far._fields, sums)))
    faded = before.fade + decay[..., None]
    pairs = zip((before.k, before.v, faded, before.score, before.place), part[3:])
    k, v, fade, score, place = (torch.cat(pair, 2) for pair in pairs)
    order = place.argsort(dim=-1, stable=True)
    order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    stays, leaves = order[..., : how.slots], order[..., how.slots :]
    if how.feature_map is not None:
        there = score.gather(-1, leaves) > -torch.inf
        sums = added(sums, None, sums_of(how, at(k, leaves), at(v, leaves), fade.gather(-1, leaves), there))
    fade, score, place = (x.gather(-1, stays) for x in (fade, score, place))
    return Far(*sums, at(k, stays), at(v, stays), fade, score, place)


def sums_of(how: Options, k: Tensor, v: Tensor, fade: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S, z and M of some keys, where they are there."""
    phi, weight = scaled_features(how, k, "keys")
    weight = (weight + fade).masked_fill(~there, -torch.inf)[..., None]
    log_weight = phi + weight if how.log_features else weight
    M = log_weight.detach().amax(2)  # (b, g, f or 1)
    factor = (log_weight - finite(M)[:, :, None]).exp()
    features = factor if how.log_features else phi * factor
    return features.mT @ v.to(features.dtype), features.sum(2), M if how.log_features else M[..., 0]


def added(before: Any, decay: Tensor | None, part: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Two S, z and M as one, the first of which fades. M is a constant under autograd."""
    by_feature, faded = before[2].ndim == 3, before[2]
    if decay is not None:
        faded = faded + (decay[..., None] if by_feature else decay)
    M = torch.maximum(faded.detach(), part[2])
    keep, add = ((x - finite(M)).exp() for x in (faded, part[2]))
    keep, add = (x if by_feature else x[..., None] for x in (keep, add))
    S = keep[..., None] * before[0] + add[..., None] * part[0]
    return S, keep * before[1] + add * part[1], M
