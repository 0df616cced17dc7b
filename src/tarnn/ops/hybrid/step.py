"""One token of hybrid attention: its time and the size of its state don't depend on how many came before."""

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.contract import choose
from tarnn.kernels.hybrid import Token, at, room_of, weakest
from tarnn.ops.features import check_widths, raw_features
from tarnn.ops.hybrid.arguments import Options, scaled_features, within
from tarnn.ops.hybrid.slots import scores
from tarnn.ops.hybrid.state import HybridState


def take_step(
    how: Options, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: HybridState, *, inplace: bool
) -> tuple[Tensor, HybridState, Tensor]:
    """One real token of each row: o (b, h, 1, e), the state behind it, ρ (b, h, 1)."""
    if not inplace:
        state = state.clone()
    s = state
    # e^−10⁴ is 0
    decay = None if log_decay is None else log_decay.clamp(min=-1e4).to(s.fade.dtype)
    far, slots = _features(how, q, s)
    constants = (how.sinks, how.window, how.scale, how.softcap or 0.0, how.log_features)
    token = Token._make((q, k, v, *far, decay, s.k, s.v, s.fade, s.count, s.S, s.z, s.M, *slots, *constants))
    outputs = choose("hybrid", token).step(token)
    if inplace:
        increment_version((s.k, s.v, s.fade, s.score, s.place, s.S, s.z, s.M, s.count))
    return outputs.o, state, outputs.share


def _features(how: Options, q: Tensor, state: HybridState) -> tuple[list[Any], list[Any]]:
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
