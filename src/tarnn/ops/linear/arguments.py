"""From the arguments of an op to the record that backends take: cast, checked, with what the map declares."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap, Projected, Projection
from tarnn.kernels.linear import Call, Outputs
from tarnn.log_features import causal_units, full_units
from tarnn.numerics import autocast, default_eps, finite, wide, widen
from tarnn.ops.checks import check_attention, check_state
from tarnn.ops.features import check_widths, features, log_features, map_of
from tarnn.ops.states import LinearState
from tarnn.ops.validated import skip_repeated_checks


class PreparedCall(NamedTuple):
    """A call, and what its outputs still need."""

    call: Call
    log_weight: Tensor | None = None  # (b, h, t), of the output
    M: Tensor | None = None  # (n, g, f)  maxima after it, of a map whose sums have one for each feature

    def state_of(self, outputs: Outputs) -> LinearState:
        """Return the state after the call."""
        M = outputs.M if self.call.weighted else None
        return LinearState(outputs.S, outputs.z, M if self.M is None else self.M)


@skip_repeated_checks
def make_call(
    q,
    k,
    v,
    feature_map,
    causal,
    normalize,
    eps,
    key_mask=None,
    cu_seqlens=None,
    log_decay=None,
    key_log_weight=None,
    state=None,
) -> PreparedCall:
    """Decays and log-weights come in the wide dtype, so that sums over them and their gradients do too. Raises ValueError
    and TypeError for arguments that don't fit each other.
    """
    q, k, v = autocast(q, k, v)
    at_least_one = is_at_least_one(normalize, eps)
    check_attention(q, k, v, causal, key_mask, cu_seqlens, log_decay, key_log_weight, grouped_values=True)
    phi = map_of(feature_map, q, normalize is True)
    if state is not None and (not isinstance(state, LinearState) or state.S is None or state.z is None):
        raise ValueError(f"state must be a LinearState(S, z, M) with S and z; got {type(state).__name__}.")
    eps = default_eps(q.dtype) if eps is None else float(eps)
    if key_mask is not None and not phi.kernel:  # whatever stands at masked keys, NaN too, meets no map
        k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
    options = (causal, normalize, eps, key_mask, cu_seqlens, log_decay, key_log_weight, state)
    if phi.log_features and not at_least_one:
        y, x = log_features(phi, q, "queries"), log_features(phi, k, "keys")
        return _by_feature(None, None, y, x, v, *options)
    if phi.log_features or (at_least_one and not phi.kernel):
        raise ValueError(
            'normalize="at_least_one" takes the maps that kernels know, whose sums have one scale: "identity", Elu() and their '
            f"kin; got {phi._get_name()}."
        )
    declared = _declared(phi, q, k)
    if _weighs_channels(log_decay, key_log_weight, state) and not at_least_one:
        return _by_feature(*_features_apart(phi, declared, q, k, key_mask), v, *options)
    projection, q, k, query_log_weight, weight = declared
    function, omega, bias, factor, square, offset, shift = projection
    sums = wide(q.dtype)
    if log_decay is not None:
        log_decay = log_decay.to(sums)
        log_decay = log_decay[None, :, None].expand(v.shape[:3]) if log_decay.ndim == 1 else log_decay
    if key_log_weight is not None:
        key_log_weight = key_log_weight.to(sums)
        weight = key_log_weight if weight is None else weight + key_log_weight
    if omega is not None:
        _check_projection(omega, bias, q, k)
        omega, bias = _for_heads(omega, k, v), None if bias is None else _for_heads(bias, k, v)
    S, z, M = (None, None, None) if state is None else (state.S, state.z, state.M)
    call = Call(
        q, k, v, log_decay, weight, S, z, omega, bias, M, key_mask, cu_seqlens, function, causal, bool(normalize), eps,
        factor, square, offset, shift, at_least_one,
    )  # fmt: skip
    _check_state(call)
    return PreparedCall(call, None if normalize else query_log_weight)


def is_at_least_one(normalize: Any, eps: float | None) -> bool:
    """Whether max(|den|, 1) divides. ValueError for a normalize that nobody knows, or with an eps that nobody reads."""
    if isinstance(normalize, bool):
        return False
    if normalize != "at_least_one":
        raise ValueError(f'normalize must be True, False or "at_least_one"; got {normalize!r}.')
    if eps is not None:
        raise ValueError(f'normalize="at_least_one" divides by 1 at least, and takes no eps; got {eps!r}.')
    return True


def _weighs_channels(log_decay: Tensor | None, key_log_weight: Tensor | None, state: Any) -> bool:
    """Whether sums need a maximum for each channel: channels that fade in turns fall below any one for all. (Exponential
    features, whose scales are log-weights too, have one for all, unless the state has more.)"""
    if log_decay is None or log_decay.ndim != 4 or log_decay.shape[3] == 0:
        return False
    return key_log_weight is not None or (state is not None and state.M is not None and state.M.ndim == 3)


def _features_apart(
    phi: FeatureMap, declared: Projected, q: Tensor, k: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of queries and keys, and the logarithms of what they are to be multiplied with."""
    if declared.projection.function == "identity" and declared.projection.omega is None:
        (q, y), (k, x) = (declared.q, declared.query_log_weight), (declared.k, declared.key_log_weight)
    else:
        k = k if key_mask is None else k.masked_fill(~key_mask[:, None, :, None], 0.0)
        (q, y), (k, x) = features(phi, q, "queries"), features(phi, k, "keys")
    q, k = widen(q), widen(k)
    y, x = (like.new_zeros(like.shape[:3]) if part is None else part.to(like.dtype) for part, like in ((y, q), (x, k)))
    return q, k, y[..., None].expand_as(q), x[..., None].expand_as(k)


def _by_feature(
    q, k, y, x, v, causal, normalize, eps, key_mask, cu_seqlens, log_decay, key_log_weight, state
) -> PreparedCall:
    """A call of features e^y ⊙ q and e^x ⊙ k (None: 1) in units of their own maxima, which decay in their place."""
    check_widths(y, x)
    if v.shape[1] != x.shape[1]:  # maxima are one for each state
        q, k, y, x = (z if z is None else z.repeat_interleave(v.shape[1] // x.shape[1], 1) for z in (q, k, y, x))
    if key_log_weight is not None:
        x = x + key_log_weight.to(x.dtype)[..., None]
    if key_mask is not None:
        x = x.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    (b, g, s, f), n = x.shape, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    S, z, M = (None, None, x.new_full((n, g, f), -torch.inf)) if state is None else (state.S, state.z, state.M)
    if state is not None:
        check_sums((n, g, f, v.shape[3]), x, S, z, M, by_feature=True)
        M = x.new_zeros(n, g, f) if M is None else M if M.ndim == 3 else M[..., None].expand(n, g, f)
    if causal:
        if log_decay is not None:
            log_decay = log_decay.to(x.dtype)
            log_decay = log_decay[None, :, None].expand(b, g, s) if log_decay.ndim == 1 else log_decay
            _check_channels(log_decay, (b, g, s, f))
            log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
            if key_mask is not None:  # no time passes at what is masked
                log_decay = log_decay.masked_fill(~key_mask[:, None, :, None], 0.0)
        scaled = causal_units(y, x, log_decay, M, cu_seqlens)
    else:
        scaled = full_units(y, x, M, cu_seqlens)
        if S is not None and z is not None:
            keep = (M - finite(scaled.M)).exp()
            S, z = S * keep[..., None], z * keep
    q, k = scaled.q if q is None else q * scaled.q, scaled.k if k is None else k * scaled.k
    call = Call(
        q, k, v, scaled.log_decay, None, S, z, None, None, None, key_mask, cu_seqlens, "identity",
        causal, normalize, eps,
    )  # fmt: skip
    return PreparedCall(call, None if normalize else scaled.U, scaled.M)


def with_log_weights(o: Tensor, log_weight: Tensor | None) -> Tensor:
    """Multiply each row of o (b, h, t, e) by e^log_weight (b, h, t), in two halves, which overflow later. A row of zeros stays
    one whatever its weight, and passes no infinite gradient on."""
    if log_weight is None:
        return o
    most = math.log(torch.finfo(log_weight.dtype).max)
    nothing = (o == 0).all(-1) & (log_weight > most)
    half = (0.5 * log_weight).clamp(max=most).masked_fill(nothing, -torch.inf).exp()[..., None]
    return (o * half * half).to(o.dtype)


def _declared(phi: FeatureMap, q: Tensor, k: Tensor) -> Projected:
    """Attention with a map as the kernels do it: by a function that they know, by a projection and such a function,
    or, with any other module, from its features.
    """
    if phi.kernel:
        return Projected(Projection(phi.kernel), q, k)
    found = phi.projected(q, k)
    if found is None:
        (q, q_scale), (k, k_scale) = features(phi, q, "queries"), features(phi, k, "keys")
        check_widths(q, k)
        return Projected(Projection("identity"), q, k, q_scale, k_scale)
    return found


def _check_projection(omega: Tensor, bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    """ValueError for a Ω (·, ·, m, d) or β (·, ·, m) that is not as wide as what it projects: kernels would read beyond it."""
    widths = {omega.shape[-1], q.shape[-1], k.shape[-1]}
    fits = bias is None or (bias.ndim == 3 and bias.shape[-1] == omega.shape[-2])
    if omega.ndim != 4 or len(widths) > 1 or not fits:
        bias_shape = "" if bias is None else f" and β {tuple(bias.shape)}"
        raise ValueError(
            f"a projection takes Ω (b or 1, g or 1, m, d) and β (b or 1, g or 1, m); got Ω {tuple(omega.shape)}{bias_shape} for "
            f"q {tuple(q.shape)} and k {tuple(k.shape)}."
        )


def _for_heads(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A parameter of a map's heads, one for all or one for each head of k, with one for each of v in the second case.

    ValueError for other numbers of heads or rows.
    """
    (b, g), (rows, heads) = k.shape[:2], x.shape[:2]
    if g % heads or rows not in (1, b):
        raise ValueError(
            f"a map with parameters for {rows} rows and {heads} heads needs as many rows and a multiple of its heads; "
            f"got k {tuple(k.shape)}."
        )
    return x if heads in (1, v.shape[1]) else x.repeat_interleave(v.shape[1] // heads, dim=1)


def _check_state(call: Call) -> None:
    """Raise unless a state, and a per-channel decay, fit the keys, features and values of a call."""
    (b, g, s, _), f = call.v.shape, call.num_features
    if call.log_decay is not None:
        _check_channels(call.log_decay, (b, g, s, f))
    if call.S is not None:
        check_sums((call.num_sequences, g, f, call.v.shape[3]), call.k, call.S, call.z, call.M)


def _check_channels(log_decay: Tensor, shape: tuple[int, int, int, int]) -> None:
    if log_decay.ndim == 4 and log_decay.shape[3] != shape[3]:
        raise ValueError(
            f"a log_decay with channels must be (b, g, s, f) = {shape}, per feature; got {tuple(log_decay.shape)}."
        )


def check_sums(shape: tuple[int, int, int, int], like: Tensor, S, z, M, *, by_feature: bool = False) -> None:
    """Raise ValueError unless a state's sums are of this shape (n, g, f, e), and as wide and where sums over `like` are."""
    (n, g, f, _), device, dtype = shape, like.device, wide(like.dtype)
    maxima = (n, g, f) if by_feature and M is not None and M.ndim == 3 else (n, g)
    for name, x, expected in (("S", S, shape), ("z", z, (n, g, f)), ("M", M, maxima)):
        if x is not None:
            check_state(name, x, expected, dtype, device)
