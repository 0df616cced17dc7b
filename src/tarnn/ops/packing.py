"""Packed batches as a caller sees them: their bounds checked, and each sequence turned around."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tarnn.kernels.packing import bounds

__all__ = ["bounds", "reverse"]


def reverse(x: Shaped[Tensor, "..."], cu_seqlens: Int[Tensor, " n_plus_1"], dim: int = -2) -> Shaped[Tensor, "..."]:
    """Each packed sequence turned around within its own bounds along `dim`; its own inverse.

    With it, causal attention runs from the last token to the first: reverse the inputs, attend, reverse the
    output. (Flipping the whole row would put the sequences in another order, and cu_seqlens out of place.)
    """
    t = x.shape[dim]
    index = torch.arange(t, device=x.device)
    which = torch.searchsorted(cu_seqlens.to(torch.int64), index, right=True) - 1  # the sequence of each token
    turned = cu_seqlens[which] + cu_seqlens[which + 1] - 1 - index
    return x.index_select(dim, turned)
