"""Packed batches as a caller sees them: their bounds checked, and each sequence turned around."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from tarnn.kernels.packing import bounds

__all__ = ["bounds", "reverse", "turned_around"]


def reverse(x: Shaped[Tensor, "..."], cu_seqlens: Int[Tensor, " n_plus_1"], dim: int = -2) -> Shaped[Tensor, "..."]:
    """Each packed sequence turned around within its own bounds along `dim`; its own inverse.

    With it, causal attention runs from the last token to the first: reverse the inputs, attend, reverse the
    output. (Flipping the whole row would put the sequences in another order, and cu_seqlens out of place.)
    """
    return x.index_select(dim, turned_around(torch.arange(x.shape[dim], device=x.device), cu_seqlens))


def turned_around(tokens: Int[Tensor, " t"], cu_seqlens: Int[Tensor, " n_plus_1"]) -> Int[Tensor, " t"]:
    """Where each token of a packed row stands once its sequence is turned around."""
    which = torch.searchsorted(cu_seqlens.to(torch.int64), tokens, right=True) - 1  # the sequence of each token
    return cu_seqlens[which] + cu_seqlens[which + 1] - 1 - tokens
