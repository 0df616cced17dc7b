"""Hybrid attention: exact softmax where it matters, features for the rest, one denominator.

Each key lives in exactly one store. The first s tokens of a sequence are its *sinks*, the last w its *window*; of the keys
that have left the window, the c that features represent worst are in the *slots*, and all others have entered the sums of
linear attention. With the log-weights of the exact keys (softmax's) and those of the
others (estimated by features), both summed by log-sum-exp,

    ℓ^E = log Σ_exact e^(s_ij)        ℓ^R = λ + a_i + M_i + log φ̂_iᵀz        ℓ = log(e^ℓ^E + e^ℓ^R)
    o_i = (Σ_exact e^(s_ij) v_j + e^(λ + a_i + M_i) Sᵀφ̂_i) / e^ℓ            ρ_i = e^(ℓ^R − ℓ)

φ(q_i) = φ̂_i e^(a_i), and S, z in units of e^(M_i), the running maximum of the log-weights of the keys that have entered the
sums. It is causal to the bit: M_i depends on these keys alone.

The calls: `attend.py`; how they are computed in chunks: `kernels/eager/hybrid.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tarnn.feature_maps.by_name import map_for
from tarnn.kernels.hybrid import at
from tarnn.kernels.packing import bounds, buckets
from tarnn.numerics import autocast, full_precision
from tarnn.ops.checks import check_attention, check_step
from tarnn.ops.hybrid.arguments import Options, check_lengths, check_options
from tarnn.ops.hybrid.attend import attend, is_watched, take_step
from tarnn.ops.states import HybridState


def hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, feature_map: nn.Module | str | None = None, *,
    causal: bool, window: int, sinks: int = 0, slots: int = 0, scale: float | None = None, far_bias: Tensor | float = 0.0,
    softcap: float | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    log_decay: Tensor | None = None, exact_queries: Tensor | None = None, state: HybridState | None = None,
    return_state: bool = False, return_far_share: bool = False, inplace: bool = False, far_until: int | None = None,
):  # fmt: skip
    """Softmax attention to a window and to sinks, and features of all other keys, in time and memory linear in t.

    q (b, h, t, d), k (b, g, t, d), v (b, g, t, e) as in `softmax_attention`. Time is counted in real tokens: those that
    key_mask (b, t) leaves in. With window + sinks + slots ≥ t this is softmax attention.

    Args:
        feature_map: φ, whose products estimate e^(scale·q·k), such as `PositiveRandomFeatures`; None: keys beyond window
            and sinks are not seen at all.
        causal: query i sees keys j ≤ i only.
        window: keys at a distance of less than this are exact, the query's own among them; on both sides where not causal.
        sinks: the first so many tokens of a sequence are exact for every query.
        slots: so many keys per key/value head that features represent badly stay exact after they have left the window
            (`arguments.py` says how they are chosen); without causality, so many of the whole row.
        scale: of the products, 1/√d by default. softcap c: then c·tanh(product / c).
        far_bias: λ, a number or (h,), added to the log-weight of every estimated key.
        far_until: queries at this place of their sequence (from 0) and beyond see no estimated key; where not causal, no
            query of a longer sequence does. None: all do.
        cu_seqlens: (n + 1,), sequences end to end in one row.
        log_decay: ≤ 0, (g,) or (b, g, t), causal only: keys fade, exact ones too. A constant −m is ALiBi's slope m.
        exact_queries: places (n,) whose queries see every key exactly, such as [0] for a CLS token. Without a state.
        state, return_state: as in `linear_attention`; causal only. The size of a state does not grow.
        inplace: of one token only: the given state is written into, and is the one that is returned.
        return_far_share: also return ρ (b, h, t), the share of each query's weight that was estimated.

    Weights and sums are float32, float64 for float64 inputs; o has the dtype of v. Zeros at masked tokens. NaN and infinities
    as in `linear_attention`: nothing later changes an earlier output, finite or not, and a NaN shows wherever it is used, also
    in calls and steps that go on from a state.

    Returns o (b, h, t, e), then the state and ρ where they were asked for. Raises ValueError for what doesn't fit.
    The shared denominator is that of Scatterbrain (Chen et al. 2021, arXiv 2110.15343).
    """
    q, k, v = autocast(q, k, v)
    check_attention(q, k, v, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, log_decay=log_decay)
    check_options(
        q, causal, window, sinks, slots, scale, softcap, far_bias, log_decay, state, return_state, exact_queries
    )
    if far_until is not None and far_until < 0:
        raise ValueError(f"far_until must be 0 or more, or None for no end; got {far_until}.")
    (b, _, t, d), g = q.shape, k.shape[1]
    check_lengths(q, k)
    phi = None if feature_map is None else map_for(feature_map, q)
    if phi is not None:
        phi.check_positive()
    scale = d**-0.5 if scale is None else scale
    how = Options(phi, causal, window, sinks, slots, scale, softcap, far_bias, exact_queries, far_until)
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(b, g, t)
    one = t == 1 and causal and exact_queries is None and key_mask is None and cu_seqlens is None
    if inplace and not (one and state is not None):
        raise ValueError(
            f"inplace=True is for one token and a state, without key_mask and cu_seqlens; got {t} tokens and state={state}."
        )
    state_too = state is not None or return_state or return_far_share
    with full_precision(q):
        inputs = (q, k, v, key_mask, cu_seqlens, log_decay)
        o, state, rho = compute_attention(how, *inputs, state, state_too, one, inplace)
    found = (o, *([state] if return_state else []), *([rho] if return_far_share else []))
    return found if len(found) > 1 else o


def compute_attention(
    how: Options, q, k, v, key_mask, cu_seqlens, log_decay, state, state_too: bool, one: bool, inplace: bool
) -> tuple[Tensor, HybridState | None, Tensor]:
    """Compute o, the state after it and ρ from checked arguments; `one` token without masks may be a step. `tarnn.parallel` puts
    its own function in this place."""
    if one and state is not None and (inplace or not is_watched(how, q, k, v, log_decay, *pytree.tree_leaves(state))):
        state.check(how, q.dtype)
        return take_step(how, q, k, v, log_decay, state, inplace=inplace)
    if cu_seqlens is not None:
        cuts = bounds(cu_seqlens, q.shape[2])
        return _packed(how, q, k, v, key_mask, log_decay, state, cuts, state_too)
    return _compact(how, q, k, v, key_mask, log_decay, state, state_too)


def hybrid_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: nn.Module | str | None,
    state: HybridState,
    *,
    window: int,
    inplace: bool = False,
    **options: Any,
) -> tuple[Tensor, HybridState]:
    """One token more: o (b, h, 1, e) and the new state. `inplace` writes into the given one, for loops that own it.

    Arguments, options and errors as in `hybrid_attention`, which gives the state; time and memory don't grow.
    """
    check_step("hybrid_attention", q, 4, HybridState, state, inplace)
    return hybrid_attention(
        q, k, v, feature_map, causal=True, window=window, state=state, return_state=True, inplace=inplace, **options
    )


def _compact(how: Options, q, k, v, key_mask, log_decay, state, state_too: bool):
    """Move real tokens to the front, and outputs back to their places."""
    if key_mask is None:
        return attend(how, q, k, v, None, log_decay, state, state_too)
    order = (~key_mask).to(torch.int8).argsort(dim=-1, stable=True)  # (b, t)
    q, k, v = (at(x, order) for x in (q, k, v))
    log_decay = None if log_decay is None else at(log_decay[..., None], order)[..., 0]
    o, state, rho = attend(how, q, k, v, key_mask.sum(-1), log_decay, state, state_too)
    back = order.argsort(dim=-1)
    return at(o, back), state, at(rho[..., None], back)[..., 0]


def _packed(how: Options, q, k, v, key_mask, log_decay, state, cuts, state_too: bool):
    """Compute sequences of similar length as batches, and put their outputs back into the row."""
    outputs, shares, places, states = [], [], [], []
    for members, index, real in buckets(cuts, q.device):
        mask = real if key_mask is None else real & key_mask[0][index]
        q_i, k_i, v_i = (x[0][:, index].transpose(0, 1) for x in (q, k, v))
        decay = None if log_decay is None else log_decay[0][:, index].transpose(0, 1)
        before = None if state is None else state.select(members)
        out, after, share = _compact(how, q_i, k_i, v_i, mask, decay, before, state_too)
        outputs.append(out.transpose(0, 1)[:, real])  # (h, tokens, e)
        shares.append(share.transpose(0, 1)[:, real])
        places.append(index[real])
        states.append((members, after))
    back = torch.cat(places).argsort()
    o, rho = (torch.cat(x, 1)[:, back][None] for x in (outputs, shares))
    return o, _in_order(states) if how.causal and state_too else None, rho


def _in_order(states: list[tuple[Tensor, HybridState]]) -> HybridState:
    """Return the states of all sequences, from those of the groups that they were computed in."""
    members, parts = zip(*states)
    order = torch.cat(members).argsort()
    return pytree.tree_map(lambda *xs: torch.cat(xs)[order], *parts)
