"""Token shift: the input of the token before, which RWKV's layers mix with each token's own."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class RwkvState(State):
    """The state of one RWKV block: its matrices, and the last input of each of its two layers."""

    S: Float[Tensor, "n h d e"]  # float32 (float64 for float64 weights)
    attention_input: Float[Tensor, "n hidden"]
    mlp_input: Float[Tensor, "n hidden"]


def token_shift(
    x: Float[Tensor, "b t hidden"],
    last: Float[Tensor, "n hidden"],
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
) -> tuple[Float[Tensor, "b t hidden"], Float[Tensor, "n hidden"]]:
    """Return the input of the real token before each token, and each sequence's last real one.

    last: what stands before each sequence: zeros, or the second result of an earlier call. n counts the rows of the batch, or
    the sequences that are packed into one row. key_mask: True = a real token; others are no token's token before.
    """
    if key_mask is None and cu_seqlens is None:
        joined = torch.cat([last[:, None].to(x.dtype), x], 1)
        return joined[:, :-1], joined[:, -1].clone()  # or the state would keep all of it
    (b, t, _), device = x.shape, x.device
    bounds = torch.arange(b + 1, device=device) * t if cu_seqlens is None else cu_seqlens.to(torch.int64)
    n, place = len(bounds) - 1, torch.arange(b * t, device=device)
    sequence = torch.searchsorted(bounds, place, right=True) - 1
    real = torch.ones_like(place, dtype=torch.bool) if key_mask is None else key_mask.flatten()
    seen = pad(torch.where(real, place, -1), (1, 0), value=-1).cummax(0).values  # the last real place before each
    table = torch.cat([last.to(x.dtype), x.flatten(0, 1)])
    before, end = seen[:-1], seen[bounds[1:]]
    source = torch.where(before >= bounds[sequence], before + n, sequence)
    behind = torch.where(end >= bounds[:-1], end + n, torch.arange(n, device=device))
    return table[source].view_as(x), table[behind]
