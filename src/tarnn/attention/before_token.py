"""Linear attention in which each query reads the state as it is before its own token, as in RWKV-5 and RWKV-6."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tarnn.feature_maps.elementwise import Identity
from tarnn.ops import LinearState, linear_attention
from tarnn.ops.stretches import Stretch
from tarnn.parallel.group import active

_IDENTITY = Identity()


def attend_before(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h t d"],
    v: Float[Tensor, "b h t e"],
    log_decay: Float[Tensor, "b h t d"],
    S: Float[Tensor, "n h d e"],
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "n h d e"]]:
    """o_t = S_{t−1}ᵀ q_t with S_t = Diag(e^log_decay_t) S_{t−1} + k_t v_tᵀ: return o, and S behind.

    Keys, values and decays go to `linear_attention` one place behind their queries, so that each sequence has one place more.
    Nothing is divided by a decay, which may be as strong as it likes.
    """
    b, t, device = q.shape[0], q.shape[2], q.device
    place = torch.arange(t, device=device)
    sequences, bounds = 1, None
    if cu_seqlens is not None:
        sequences, here = len(cu_seqlens) - 1, cu_seqlens
        added = torch.arange(len(cu_seqlens), device=device)  # places before each bound
        if (ranks := active()) is not None:
            stretch = Stretch.agreed(ranks, t, cu_seqlens, {"the op": "attend_before"})
            sequences, here = len(stretch.here) if t else 0, stretch.local_bounds(cu_seqlens)
            added = pad(stretch.pieces().cumsum(0), (1, 0))
        bounds = cu_seqlens + added.to(cu_seqlens)
        place = place + torch.searchsorted(here.to(torch.int64), place, right=True) - 1
    length = t + sequences

    def at(index: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:2], length, x.shape[3]).index_copy(2, index, x)

    if key_mask is not None:
        everywhere = torch.ones(b, length, dtype=torch.bool, device=device)
        key_mask = everywhere.index_copy(1, place + 1, key_mask)
    o, state = linear_attention(
        at(place, q), at(place + 1, k), at(place + 1, v), _IDENTITY, causal=True, normalize=False,
        log_decay=at(place + 1, log_decay), key_mask=key_mask, cu_seqlens=bounds,
        state=LinearState(S, S.new_zeros(S.shape[:3])), return_state=True,
    )  # fmt: skip
    return o.index_select(2, place), state.S
