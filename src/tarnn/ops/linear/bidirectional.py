"""Linear attention that fades to both sides, composed of two causal calls of it: their sums of weights are added.

The second call reads each sequence from its last token to its first and leaves out each query's own key, which the first
has counted: its query reads the state after the next token, faded by the query's own decay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.elementwise import Identity
from tarnn.log_features import causal_units
from tarnn.numerics import autocast, default_eps, finite, full_precision, widen
from tarnn.ops.checks import check_attention, check_decay
from tarnn.ops.features import check_widths, features, log_features, map_of
from tarnn.ops.linear.arguments import is_at_least_one
from tarnn.ops.packing import turned_around

_IDENTITY = Identity()


class ReversedSequence:
    """The order of keys when a row is read from its end, and of queries: each stands at the place of the key after it.

    cu_seqlens bounds the sequences packed into one row, before and after; None: each row is one.
    """

    def __init__(self, num_tokens: int, cu_seqlens: Int[Tensor, " n_plus_1"] | None, device: torch.device):
        token = torch.arange(num_tokens, device=device)
        if cu_seqlens is None:  # all have t places: torch.export would hold t − 1 to be no 1
            self.turned, self.is_last = token.flip(0), token == num_tokens - 1
            self.is_first = self.is_last
        else:
            self.turned = turned_around(token, cu_seqlens)  # the token in each place, and the place of each token
            self.is_first = torch.isin(self.turned, cu_seqlens[:-1])
            self.is_last = torch.isin(token + 1, cu_seqlens[1:])

    def keys(self, x: Shaped[Tensor, "..."], dim: int = 2) -> Shaped[Tensor, "..."]:
        """Return x of keys, with time along `dim`, in this order."""
        return x.index_select(dim, self.turned)

    def queries(self, x: Shaped[Tensor, "b h t ..."]) -> Shaped[Tensor, "b h places ..."]:
        """Return x of queries in this order; zeros in places that no query has."""
        return x.index_select(2, (self.turned - 1).clamp(min=0)).masked_fill(_like(x, self.is_first), 0.0)

    def outputs(self, o: Shaped[Tensor, "b h places ..."], of_none: float = 0.0) -> Shaped[Tensor, "b h t ..."]:
        """Return outputs in the order of tokens; `of_none` for last tokens, which have no key after them."""
        return o.index_select(2, self.turned.roll(-1)).masked_fill(_like(o, self.is_last), of_none)


def _like(x: Tensor, mask: Tensor) -> Tensor:
    """A mask (t,) that broadcasts to x (b, h, t, …)."""
    return mask.view(-1, *[1] * (x.ndim - 3))


class Sides(NamedTuple):
    """The inputs that both calls share, and how keys fade in each."""

    attend: Callable[..., Tensor]  # `linear_attention`
    v: Tensor  # (b, m, t, e)
    forward: Tensor  # (b, m, t) or (b, m, t, f); 0 at masked tokens
    back: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    order: ReversedSequence

    def sums(self, q: Tensor, k: Tensor, phi: FeatureMap, log_decay: Tensor) -> Tensor:
        """Sum weighted values over the keys up to each query's own."""
        return self._call(q, k, self.v, phi, log_decay, self.key_mask)

    def sums_after(self, q: Tensor, k: Tensor, phi: FeatureMap, log_decay: Tensor) -> Tensor:
        """Sum them over the keys after it; q, k and log_decay in the reversed order."""
        order = self.order
        key_mask = None if self.key_mask is None else order.keys(self.key_mask, 1)
        return order.outputs(self._call(q, k, order.keys(self.v), phi, log_decay, key_mask))

    def _call(self, q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, log_decay: Tensor, key_mask) -> Tensor:
        options = {"causal": True, "normalize": False, "cu_seqlens": self.cu_seqlens, "log_decay": log_decay}
        return self.attend(q, k, v, phi, key_mask=key_mask, **options)


def attend_both_sides(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Any,
    causal: bool,
    normalize: bool | str,
    eps: float | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_decay: Any,
    key_log_weight: Tensor | None,
    state: Any,
    log_decay_back: Any,
    return_state: bool,
) -> Tensor:
    """Compute attention with decays to both sides from two causal calls of `attend`, which is `linear_attention`."""
    _check_sides(causal, log_decay, log_decay_back, state is not None or return_state)
    q, k, v = autocast(q, k, v)
    at_least_one, dtype = is_at_least_one(normalize, eps), v.dtype
    _check(q, k, v, key_mask, cu_seqlens, log_decay, log_decay_back, key_log_weight)
    order = ReversedSequence(q.shape[2], cu_seqlens, q.device)
    phi = map_of(feature_map, q, normalize is True)
    eps = default_eps(q.dtype) if eps is None else float(eps)
    with full_precision(q):  # sums are rounded after they are added and divided
        q, k, v = widen(q), widen(k), widen(v)
        forward, back = (_decay_of_tokens(x.to(v.dtype), v, key_mask) for x in (log_decay, log_decay_back))
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
        sides = Sides(attend, values, forward, back, key_mask, cu_seqlens, order)
        plain = phi.kernel and phi.kernel != "exp" and key_log_weight is None
        if plain and sides.forward.ndim == sides.back.ndim == 3:
            sums, unit = _of_kernels(sides, q, k, phi), None
        else:
            sums, unit = _of_features(sides, q, k, phi, key_log_weight)
        if not normalize:
            o = sums if unit is None else sums * unit.exp()[..., None]
        elif at_least_one:
            least = torch.ones_like(sums[..., 0]) if unit is None else (-unit).exp()
            o = sums[..., :-1] / torch.maximum(sums[..., -1].abs(), least)[..., None]
        else:
            den = sums[..., -1:]
            o = sums[..., :-1] / (den + eps).masked_fill(den == 0, torch.inf)
    return o.to(dtype)


def _check_sides(causal: bool, log_decay, log_decay_back, with_state: bool) -> None:
    """Raise ValueError for decays that don't go with causality, or with a state."""
    if causal:
        raise ValueError(
            "log_decay_back fades later tokens, which causal attention does not see; leave it out, or pass causal=False."
        )
    if log_decay is None or log_decay_back is None:
        missing = "log_decay" if log_decay is None else "log_decay_back"
        raise ValueError(
            "log_decay needs causal=True; attention to both sides takes two decays, log_decay for the keys before a query "
            f"and log_decay_back for those after it, and {missing} is missing."
        )
    if with_state:
        raise ValueError(
            "attention that fades to both sides has no state: what comes later fades all that is before it. Leave out state= "
            "and return_state=True."
        )


def _check(q, k, v, key_mask, cu_seqlens, log_decay, log_decay_back, key_log_weight) -> None:
    check_attention(q, k, v, False, key_mask, cu_seqlens, None, key_log_weight, grouped_values=True)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a decay runs along time: it needs as many keys as queries; got {q.shape[2]} queries and {k.shape[2]} keys."
        )
    check_decay("log_decay", log_decay, v)
    check_decay("log_decay_back", log_decay_back, v)


def _decay_of_tokens(log_decay: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """(b, m, t) or (b, m, t, f); nothing fades at masked tokens."""
    x = log_decay[None, :, None].expand(v.shape[:3]) if log_decay.ndim == 1 else log_decay
    if key_mask is None:
        return x
    absent = ~key_mask[:, None]
    return x.masked_fill(absent if x.ndim == 3 else absent[..., None], 0.0)


def _of_kernels(sides: Sides, q: Tensor, k: Tensor, phi: FeatureMap) -> Tensor:
    """Add the sums of both calls, with features made by the kernels."""
    order = sides.order
    before = sides.sums(q, k, phi, sides.forward)
    after = sides.sums_after(order.queries(q), order.keys(k), phi, order.keys(sides.back))
    return before + after * _for_heads(sides.back.exp(), before.shape[1])[..., None]


class _Part(NamedTuple):
    """Features of queries and keys, e^y and e^x times these, and a decay per feature or for all."""

    q: Tensor  # (b, h, t, f)
    k: Tensor  # (b, m, t, f)
    y: Tensor | None  # (b, h, t, 1 or f)
    x: Tensor | None  # (b, m, t, 1 or f)
    log_decay: Tensor  # (b, m, t, 1 or f)

    def in_units(self, cu_seqlens: Tensor | None) -> tuple[tuple[Tensor, Tensor, FeatureMap, Tensor], Tensor | None]:
        """Return the arguments of a call and the log of the unit of each sum, (b, h, t): −∞ without a key; None: of 1."""
        q, k, y, x, log_decay = self
        if x is None:
            q = q if y is None else q * y.exp()
            return (q, k, _IDENTITY, _narrow(log_decay)), None
        y = torch.zeros_like(q[..., :1]) if y is None else y
        x = x.expand(*x.shape[:3], max(x.shape[3], log_decay.shape[3]))
        n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        nothing = x.new_full((n, x.shape[1], x.shape[3]), -torch.inf)
        scaled = causal_units(y, x, log_decay, nothing, cu_seqlens)
        unit = scaled.U.masked_fill(scaled.q.detach().amax(-1) == 0, -torch.inf)  # else the largest is 1
        return (q * scaled.q, k * scaled.k, _IDENTITY, _narrow(cast(Tensor, scaled.log_decay))), unit


def _of_features(
    sides: Sides, q: Tensor, k: Tensor, phi: FeatureMap, key_log_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add the sums of both calls, from features. Also return the logarithm of the unit that they are in.

    If keys have log-weights, each call has units of its own, the running maxima.
    """
    order = sides.order
    first = _first_part(sides, q, k, phi, key_log_weight)
    own = _for_heads(sides.back if sides.back.ndim == 4 else sides.back[..., None], first.q.shape[1])
    second = _Part(
        order.queries(first.q),
        order.keys(first.k),
        order.queries(own if first.y is None else first.y + own),
        None if first.x is None else order.keys(first.x),
        order.keys(sides.back if sides.back.ndim == 4 else sides.back[..., None]),
    )
    arguments, unit = first.in_units(sides.cu_seqlens)
    before = sides.sums(*arguments)
    arguments, unit_after = second.in_units(sides.cu_seqlens)
    after = sides.sums_after(*arguments)
    if unit is None or unit_after is None:
        return before + after, None
    units = (unit, order.outputs(unit_after, -torch.inf))
    most = finite(torch.maximum(*units))
    before, after = (sums * (u - most).exp()[..., None] for u, sums in zip(units, (before, after)))
    return before + after, most


def _first_part(sides: Sides, q: Tensor, k: Tensor, phi: FeatureMap, key_log_weight: Tensor | None) -> _Part:
    """Compute features, in the order of tokens."""
    m, absent = sides.v.shape[1], None if sides.key_mask is None else ~sides.key_mask[:, None, :, None]
    if absent is not None:  # whatever stands at masked keys, NaN too, meets no map
        k = k.masked_fill(absent, 0.0)
    y: Tensor | None
    x: Tensor | None
    if phi.log_features:
        logs = log_features(phi, q, "queries"), log_features(phi, k, "keys")
        check_widths(*logs)
        (phi_q, phi_k), (y, x) = (torch.ones_like(part[..., :1]) for part in logs), logs
    else:
        (phi_q, of_q), (phi_k, of_k) = features(phi, q, "queries"), features(phi, k, "keys")
        check_widths(phi_q, phi_k)
        y, x = (None if scale is None else scale[..., None] for scale in (of_q, of_k))
    phi_q, phi_k = _for_heads(phi_q, max(m, q.shape[1])), _for_heads(phi_k, m)
    y, x = None if y is None else _for_heads(y, phi_q.shape[1]), None if x is None else _for_heads(x, m)
    if key_log_weight is not None:
        weight = key_log_weight.to(phi_k.dtype)[..., None]
        x = weight if x is None else x + weight
    if x is None and y is not None:  # then units are asked for
        x = torch.zeros_like(phi_k[..., :1])
    if x is not None and absent is not None:
        x = x.masked_fill(absent, -torch.inf)
    return _Part(phi_q, phi_k, y, x, sides.forward if sides.forward.ndim == 4 else sides.forward[..., None])


def _narrow(log_decay: Tensor) -> Tensor:
    """One decay for all features as (b, m, t)."""
    return log_decay[..., 0] if log_decay.shape[3] == 1 else log_decay


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """x (b, g, …) for so many heads, a multiple of g."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
