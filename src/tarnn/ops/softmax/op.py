"""Softmax attention with the signature of linear attention, and the key/value cache that it needs: the baseline.

It is torch's own scaled_dot_product_attention, given every advantage: no copies for grouped heads where torch
can do without, a cache that is allocated once and read only as far as it is filled.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tarnn.kernels.tracing import known_finite
from tarnn.numerics import marked, set_aside
from tarnn.ops import packing
from tarnn.ops.checks import check_attention, check_step
from tarnn.ops.softmax.cache import KVCache


def softmax_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    causal: bool,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b s"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    key_log_weight: Float[Tensor, "b g s"] | None = None,
    state: KVCache | None = None,
    return_state: bool = False,
    inplace: bool = False,
    return_weights: bool = False,
):
    """o_i = Σ_j e^(scale·q_i·k_j + w_j) v_j / Σ_j e^(scale·q_i·k_j + w_j), O(t·s) time. Arguments as `linear_attention`.

    `scale` is 1/√d by default. `state` is a `KVCache`: the queries see its keys as well as the new ones. With
    `return_state` the cache with both is returned, too (without one: a full one, in the memory of k and v). The
    given one stays as it was, unless `inplace` lets the new keys be written into its room (see `KVCache.append`).
    A query that may see no key yields zeros. NaN and infinities as in `linear_attention`: nothing later changes an earlier
    output, finite or not, a NaN shows wherever it is used, and what stands at masked keys reaches nothing.
    Returns (b, h, t, e), or that and the cache; with `return_weights`
    (o, the cache, the weights (b, h, t, s), of which o is then made).

    Raises ValueError for shapes that don't fit, a full cache, and cu_seqlens together with a state.
    """
    _check(q, k, v, causal, key_mask, cu_seqlens, key_log_weight, state, return_state)
    masks = (key_mask, cu_seqlens, key_log_weight)
    return compute_attention(q, k, v, causal, scale, *masks, state, return_state, inplace, return_weights)


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    key_log_weight: Tensor | None,
    state: KVCache | None,
    return_state: bool,
    inplace: bool,
    return_weights: bool,
) -> Any:
    """Compute what `softmax_attention` returns, from checked arguments. `tarnn.parallel` puts its own function in this place."""
    if cu_seqlens is not None:
        if return_weights or torch.compiler.is_compiling():  # one graph for any bounds: pairs are masked
            which = torch.searchsorted(cu_seqlens.long(), torch.arange(q.shape[2], device=q.device), right=True)
            options: dict[str, Any] = {"causal": causal, "scale": scale, "key_log_weight": key_log_weight}
            options |= {"past": 0, "key_mask": None, "pairs": which[:, None] == which}
            return _weighted(q, k, v, None, options) if return_weights else attend(q, k, v, **options)
        cuts = packing.bounds(cu_seqlens, q.shape[2])
        pieces = [
            softmax_attention(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                causal=causal,
                scale=scale,
                key_log_weight=None if key_log_weight is None else key_log_weight[:, :, a:b],
            )
            for a, b in zip(cuts, cuts[1:])
        ]
        return torch.cat(pieces, dim=2)
    past = 0
    if state is None:
        state = KVCache(k, v, k.shape[2], None if key_mask is None else key_mask.clone())
    else:
        past = state.length
        state = state.append(k, v, key_mask, inplace=inplace) if k.shape[2] else state
        k, v, key_mask = state.read(q.dtype)
    options = {"causal": causal, "scale": scale, "key_log_weight": key_log_weight}
    options |= {"past": past, "key_mask": key_mask}
    if return_weights:
        return _weighted(q, k, v, state, options)
    o = attend(q, k, v, **options)
    return (o, state) if return_state else o


def softmax_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 e"],
    state: KVCache,
    *,
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b h 1 e"], KVCache]:
    """One token of softmax attention: O(length) time. Returns o and the new cache; `inplace` as in `KVCache.append`."""
    check_attention(q, k, v, causal=True)
    check_step("softmax_attention", q, 4, KVCache, state, inplace)
    state = state.append(k, v, inplace=inplace)
    k, v, key_mask = state.read(q.dtype)
    return attend(q, k, v, causal=False, past=0, scale=scale, key_mask=key_mask, key_log_weight=None), state


def _check(q, k, v, causal, key_mask, cu_seqlens, key_log_weight, state, return_state) -> None:
    check_attention(q, k, v, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, key_log_weight=key_log_weight)
    if cu_seqlens is not None and (state is not None or return_state or key_mask is not None):
        raise ValueError("softmax_attention takes cu_seqlens without state, return_state or key_mask.")
    if (return_state or state is not None) and key_log_weight is not None:
        raise ValueError("softmax_attention keeps no log-weights in its cache: pass key_log_weight without state.")


def attend(q, k, v, *, causal, past, scale, key_mask, key_log_weight, pairs=None):
    (t, s), groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    if not s or not t:
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    if key_mask is not None:  # whatever stands at masked keys is absent
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
    spoilt = None
    hides = (causal and t > 1) or pairs is not None  # some keys from some queries, by weights of zero: 0·NaN is NaN
    if hides and not known_finite(k, v):
        (k, in_k), (v, in_v) = set_aside(k), set_aside(v)
        spoilt = _users(in_k | in_v, groups, causal, past, t, pairs)
    mask = pairs if key_mask is None else key_mask[:, None, None, :]
    if causal and (mask is not None or past or key_log_weight is not None) and t > 1:
        past_or_now = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(past)
        mask = past_or_now if mask is None else mask & past_or_now
    if key_log_weight is not None:
        weight = key_log_weight.to(q.dtype).repeat_interleave(groups, dim=1)[:, :, None, :]
        mask = weight if mask is None else torch.where(mask, weight, -torch.inf)
    # is_causal: torch's own causal path, which reads half of the pairs
    o = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None and not past, scale=scale, enable_gqa=groups > 1
    )
    if key_mask is not None:
        seen = key_mask.cumsum(-1)[:, past:] > 0 if causal else key_mask.any(-1, keepdim=True).expand(-1, t)
        o = torch.where(seen[:, None, :, None], o, 0.0)  # rows that see no key: zeros, not NaN
    return marked(o, spoilt)


def _users(keys, groups: int, causal: bool, past: int, t: int, pairs) -> Tensor:
    """Which queries (b, h, t) see one of these keys (b, g, s)."""
    if pairs is not None:  # (t, s): of packed sequences
        allowed = (pairs.tril() if causal else pairs).float()
        seen = (keys.float() @ allowed.mT) > 0
    elif causal:
        seen = keys.cumsum(-1)[:, :, past:] > 0
    else:
        seen = keys.any(-1, keepdim=True).expand(-1, -1, t)
    return seen.repeat_interleave(groups, dim=1) if groups > 1 else seen


def _weighted(q, k, v, state, options) -> tuple[Tensor, KVCache | None, Tensor]:
    """(o, state, weights): the weights are what attention makes of the unit vectors as values."""
    units = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
    weights = attend(q, k, units, **options)
    g, key_mask = v.shape[1], options["key_mask"]
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0.0)
    value, spoilt = set_aside(v)
    o = (weights.unflatten(1, (g, -1)) @ value[:, :, None]).flatten(1, 2)  # (b, h, t, e)
    causal, past, pairs = options["causal"], options["past"], options.get("pairs")
    return marked(o, _users(spoilt, q.shape[1] // g, causal, past, q.shape[2], pairs)), state, weights
