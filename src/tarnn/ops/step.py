"""One token of linear attention: O(1) in time and memory, whatever came before."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.kernels import cpu
from tarnn.kernels.weights import finite
from tarnn.numerics import autocast, default_eps, full_precision, wide
from tarnn.ops.checks import check_attention, check_state
from tarnn.ops.dispatch import goes_straight, wants_gradient
from tarnn.ops.features import Inputs, features, inputs, map_of
from tarnn.ops.linear_attention import _ELU
from tarnn.ops.state import LinearState


def step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 e"],
    feature_map: FeatureMap | nn.Module | str = _ELU,
    state: LinearState | None = None,
    *,
    normalize: bool = True,
    eps: float | None = None,
    log_decay: Float[Tensor, "..."] | None = None,
    key_log_weight: Float[Tensor, "b g 1"] | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b h 1 e"], LinearState]:
    """The recurrence that `linear_attention(causal=True)` is, for one token more:

        S ← e^log_decay S + e^w φ(k) vᵀ      z ← e^log_decay z + e^w φ(k)      o = φ(q)ᵀS / (φ(q)ᵀz + eps)

    log_decay: (g,), (b, g, 1) or (b, g, 1, f). Other arguments, precision and errors as in
    `linear_attention`. `state=None` starts a sequence. Returns o and the new state; the given one stays as it
    was unless `inplace=True`, which writes into its tensors (for loops without gradients) and returns it.

    Katharopoulos et al. 2020, eq. 16–20 (arXiv 2006.16236).
    """
    q, k, v = autocast(q, k, v)
    check_attention(q, k, v, causal=True, log_decay=log_decay, key_log_weight=key_log_weight)
    phi = map_of(feature_map, q, normalize)
    if q.shape[2] != 1:
        raise ValueError(
            f"step takes one token, q (b, h, 1, d); got {tuple(q.shape)}. For more, linear_attention(state=…)."
        )
    eps = default_eps(q.dtype) if eps is None else eps
    # buffers too: torch.func.functional_call puts tensors with gradients in their places
    of_map = (*phi.parameters(), *phi.buffers()) if torch.is_grad_enabled() else ()
    sums = () if state is None else (state.S, state.z, state.M)
    tensors = (q, k, v, log_decay, key_log_weight, *sums, *of_map)
    native = goes_straight(q) and not wants_gradient(*tensors)
    if native:
        of = inputs(phi, q, k)
    else:
        if phi.random:  # whose features the kernels never round to 16 bits
            q, k = q.to(wide(q.dtype)), k.to(wide(k.dtype))
        (q, q_scale), (k, k_scale) = features(phi, q, "queries"), features(phi, k, "keys")
        of = Inputs(q, k, "identity", k.shape[3], q_scale, k_scale)
    key_log_weight = _sum(key_log_weight, of.key_log_weight)
    weighted = key_log_weight is not None or of.log_scaled
    if state is None:
        if inplace:
            raise ValueError(
                "step(inplace=True) needs a state to write into: make one with LinearState.zeros(…)."
            )
        b, g, e = *k.shape[:2], v.shape[3]
        state = LinearState.zeros(
            b, g, of.num_features, e, log_weights=weighted, dtype=wide(q.dtype), device=k.device
        )
    check_state(state, of.k, v, log_decay, num_features=of.num_features, num_sequences=None)
    if inplace and weighted and state.M is None:
        raise ValueError(
            "a state without M has no room for log-weights: make it with LinearState.zeros(…, log_weights=True)."
        )
    if native:
        o, state = _native(of, v, log_decay, key_log_weight, state, weighted, normalize, eps, inplace)
    else:
        o, state = _plain(of.q, of.k, v, log_decay, key_log_weight, state, normalize, eps, inplace)
    if of.query_log_weight is not None and not normalize:
        o = (o * of.query_log_weight.exp()[..., None]).to(v.dtype)
    return o, state


def _native(of: Inputs, v, log_decay, w, state, weighted, normalize, eps, inplace):
    """By the compiled kernel, which makes the features of the maps that it knows."""
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(of.k.shape[:3])
    M = state.M
    if weighted and M is None:
        M = state.z.new_zeros(state.z.shape[:2])
    q, k = (x if x.dtype == v.dtype else x.to(v.dtype) for x in (of.q, of.k))
    o, after = cpu.step(
        q,
        k,
        v,
        log_decay,
        w,
        state.S,
        state.z,
        M,
        of.omega,
        of.bias,
        of.function,
        normalize,
        eps,
        of.numbers,
        inplace,
    )
    S, z, M = after
    return o, (state if inplace else LinearState(S, z, M))


def _plain(q, k, v, log_decay, w, state, normalize, eps, inplace):
    """In plain PyTorch, from features: autograd, torch.compile and torch.func see through it."""
    dtype = wide(v.dtype)
    phi_q = q.to(dtype).unflatten(1, (k.shape[1], -1)).squeeze(3)  # (b, g, r, f)
    phi_k, value = k.to(dtype).squeeze(2), v.to(dtype).squeeze(2)  # (b, g, f), (b, g, e)
    keep, phi_k, M = _decay_and_weight(state, phi_k, log_decay, w)
    state = _update(state, keep, phi_k, value, M, inplace)
    with full_precision(q):
        num, den = phi_q @ state.S, phi_q @ state.z[..., None]
    if normalize:
        num = num / (den + eps).masked_fill(den == 0, torch.inf)
    elif M is not None:
        num = num * finite(M)[:, :, None, None].exp()
    return num.flatten(1, 2)[:, :, None].to(v.dtype), state  # (b, h, 1, e)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _decay_and_weight(state, phi_k, log_decay, weight) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(what the state is multiplied with (…, f or 1) or None, φ(k) weighted, new M or None)."""
    decay = None
    if log_decay is not None:
        decay = log_decay.to(phi_k.dtype)
        decay = decay[None, :, None] if decay.ndim == 1 else decay.reshape(*phi_k.shape[:2], -1)
    if weight is None and state.M is None:
        return None if decay is None else decay.exp(), phi_k, None
    before = phi_k.new_zeros(phi_k.shape[:2]) if state.M is None else state.M
    w = torch.zeros_like(before) if weight is None else weight.squeeze(2).to(phi_k.dtype)
    grown = before if decay is None else before + decay.amax(-1)
    M = torch.maximum(grown, w).detach()
    keep = before[..., None] - finite(M)[..., None]
    return (keep if decay is None else keep + decay).exp(), phi_k * (w - finite(M)).exp()[..., None], M


def _update(state, keep, phi_k, value, M, inplace) -> LinearState:
    if not inplace:
        S, z = (state.S, state.z) if keep is None else (state.S * keep[..., None], state.z * keep)
        return LinearState(torch.addcmul(S, phi_k[..., None], value[:, :, None]), z + phi_k, M)
    if keep is not None:
        state.S.mul_(keep[..., None])
        state.z.mul_(keep)
    state.S.addcmul_(phi_k[..., None], value[:, :, None])
    state.z.add_(phi_k)
    if M is not None:
        state.M.copy_(M)
    return state
