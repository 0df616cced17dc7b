"""Hybrid attention by the compiled kernels: what they can't do, the features that they are given, and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tarnn.kernels.cpu import hybrid as compiled
from tarnn.kernels.cpu.hybrid import HybridCall, Sums
from tarnn.numerics import wide
from tarnn.ops.features import check_widths, features, log_features
from tarnn.ops.hybrid.state import HybridState, Keys, Options, places, within

_CONSTANTS = len(HybridCall._fields) - 11 + 2  # of `_Attend`'s arguments: no gradient
PIECE = 4096  # tokens for which features are made at a time, so that few of them exist


def refusal(
    how: Options, q: Tensor, keys: Keys, state: HybridState, log_decay: Tensor | None, *, watched: bool, state_too: bool
) -> str | None:
    """Why plain PyTorch computes a sequence, or None. watched: autograd does; state_too: through the state or ρ, too."""
    if why := mixed(q, keys.k, keys.v, state.S) or compiled.refusal(q):
        return why
    if how.slots:
        return "Slots are filled in plain PyTorch."
    if log_decay is not None or bool(state.fade.any()):
        return "Keys fade in plain PyTorch; only single tokens do so in the compiled kernels."
    if watched and not how.causal:
        return "The gradients of attention to both sides are computed in plain PyTorch."
    if watched and (state_too or how.exact_queries is not None):
        return "Gradients through a state, ρ or exact_queries are computed in plain PyTorch."
    return None


def step_refusal(how: Options, q: Tensor, state: HybridState) -> str | None:
    """Why plain PyTorch computes a single token, or None."""
    if how.slots:
        return "Slots are filled in plain PyTorch."
    if not all(x.is_contiguous() for x in (state.fade, state.S, state.z, state.M)):
        return "The compiled step writes into states without gaps; this one is a view of another."
    return mixed(q, state.k, state.v, state.S) or compiled.refusal(q)


def mixed(q: Tensor, *others: Tensor) -> str | None:
    """A refusal where float64 meets another type."""
    if any(wide(x.dtype) != wide(q.dtype) for x in others):
        return "The compiled kernels of hybrid attention take float64 together with float64 alone."
    return None


def is_watched(how: Options, *given: Any) -> bool:
    """Whether autograd watches something that attention depends on."""
    if not torch.is_grad_enabled():
        return False
    parts = (how.far_bias, *given, *(how.feature_map or nn.Module()).parameters())
    return any(isinstance(x, Tensor) and x.requires_grad for x in parts)


def attend(
    how: Options, q: Tensor, keys: Keys, state: HybridState, plain: Callable[[HybridCall], Tensor], *, watched: bool
) -> tuple[Tensor, Tensor, Sums]:
    """o (b, h, t, e), ρ (b, h, t) and the sums behind; in pieces where autograd doesn't watch.

    plain: o of a call that nothing came before, for derivatives of gradients.
    """
    t, w = q.shape[2], how.window
    total, sums = keys.real.sum(-1), Sums(state.S, state.z, state.M)
    outputs, shares = [], []
    for start in range(0, t, PIECE if how.causal and not watched else t):
        here = slice(start, min(t, start + PIECE) if how.causal and not watched else t)
        row, size = slice(start, here.stop + w), here.stop - start
        given: Any = (
            q[:, :, here],
            keys.k[:, :, row],
            keys.v[:, :, row],
            keys.sink_k,
            keys.sink_v,
            state.count + start,
            (total - start).clamp(0, size),
            *far_of(how, q, keys, here),
            w,
            how.causal,
            how.scale,
            how.softcap or 0.0,
            how.log_features,
        )
        call = HybridCall(*given)
        if watched:
            o, share = _Attend.apply(*call, sums, plain)  # type: ignore[misc]
        else:
            o, share, _, sums = compiled.forward(call, sums, for_backward=False)
        outputs.append(o)
        shares.append(share)
    if len(outputs) == 1:
        return outputs[0], shares[0], sums
    return torch.cat(outputs, 2), torch.cat(shares, 2), sums


def far_of(how: Options, q: Tensor, keys: Keys, here: slice) -> tuple[Any, ...]:
    """φ(q), a, φ(k), w of `HybridCall`."""
    if how.feature_map is None:
        return None, None, None, None
    w = how.window
    lives = keys.there & (keys.place >= how.sinks)
    if how.causal:  # with each new token one key leaves the window
        k, enters = keys.k[:, :, here], (lives[:, : keys.real.shape[1]] & keys.real)[:, here]
    else:
        k, enters = keys.k[:, :, w:], lives[:, w:]
    phi_q, a = scaled_features(how, q[:, :, here], "queries")
    phi_k, weight = scaled_features(how, k, "keys")
    check_widths(phi_q, phi_k)
    place = places(how, keys)[:, here] if how.causal else places(how, keys)
    return phi_q, within(how, a, place), phi_k, weight.masked_fill(~enters[:, None], -torch.inf)


def scaled_features(how: Options, x: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """φ(x), or log φ(x) of a map with `log_features`, and its log-scale (b, h, t), of queries with λ; both wide."""
    assert how.feature_map is not None
    kind = wide(x.dtype)
    if how.log_features:
        phi, scale = log_features(how.feature_map, x, side), None
    else:
        phi, scale = features(how.feature_map, x, side)
    scale = torch.zeros_like(phi[..., 0]) if scale is None else scale
    if side == "queries":
        bias = torch.as_tensor(how.far_bias, device=x.device).to(kind)
        scale = scale.to(kind) + bias.expand(x.shape[1])[:, None]
    return phi.to(kind), scale.to(kind)


class _Attend(torch.autograd.Function):
    """A causal call with nothing before it. Log-scales have gradients, too: φ·dφ, summed."""

    @staticmethod
    def forward(ctx, *inputs):
        *given, sums, ctx.plain = inputs
        call = HybridCall(*given)
        o, share, log_total, _ = compiled.forward(call, sums, for_backward=True)
        ctx.save_for_backward(*call[:11], o, log_total, share)
        ctx.constants = call[11:]
        ctx.mark_non_differentiable(share)
        return o, share

    @staticmethod
    def backward(ctx, grad_o, _):
        *tensors, o, log_total, share = ctx.saved_tensors
        call = HybridCall(*tensors, *ctx.constants)
        if torch.is_grad_enabled():  # to be differentiated again
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:11]) if needed]
            found = torch.autograd.grad(
                ctx.plain(call), [tensors[i] for i in wanted], grad_o, create_graph=True, allow_unused=True
            )
            grads = dict(zip(wanted, found))
            return *(grads.get(i) for i in range(11)), *[None] * _CONSTANTS
        if call.a is not None:  # a far part that is nothing has no gradient
            call = call._replace(a=call.a.masked_fill(share == 0, -torch.inf))
        grad_q, grad_k, grad_v, grad_sink_k, grad_sink_v, grad_phi_q, grad_phi_k = compiled.backward(
            call, o, log_total, grad_o
        )
        a, weight = (
            None if grad is None else (grad if call.log_features else phi * grad).sum(-1)
            for phi, grad in ((call.phi_q, grad_phi_q), (call.phi_k, grad_phi_k))
        )
        return (
            grad_q,
            grad_k,
            grad_v,
            grad_sink_k,
            grad_sink_v,
            None,
            None,
            grad_phi_q,
            a,
            grad_phi_k,
            weight,
            *[None] * _CONSTANTS,
        )


def step(
    how: Options, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, room: Tensor, state: HybridState
) -> tuple[Tensor, Tensor]:
    """One token per row into the state, in place: o and ρ. room (b,): where the store takes it."""
    far: tuple[Any, ...] = (None, None, None, None)
    if how.feature_map is not None:
        old = state.k.gather(2, room[:, None, None, None].expand(-1, state.k.shape[1], 1, state.k.shape[3]))
        (phi_q, a), (phi_k, weight) = (scaled_features(how, x, side) for x, side in ((q, "queries"), (old, "keys")))
        check_widths(phi_q, phi_k)
        far = phi_q, within(how, a, state.count[:, None]), phi_k, weight
    decay = None if log_decay is None else log_decay[..., 0].clamp(min=-1e4).to(state.fade.dtype)
    o, rho = compiled.step(
        q,
        k.to(state.k.dtype),
        v.to(state.v.dtype),
        far,
        None if decay is None else decay[..., None],
        (state.k, state.v, state.fade),
        state.count,
        Sums(state.S, state.z, state.M),
        sinks=how.sinks,
        scale=how.scale,
        softcap=how.softcap or 0.0,
    )
    state.count.add_(1)
    return o.to(v.dtype), rho
