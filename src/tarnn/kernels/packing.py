"""Packed batches: sequences of different lengths laid end to end in one row, bounded by cu_seqlens.

`cu_seqlens` is int32 `(n + 1,)`: sequence i is the stretch cu_seqlens[i] : cu_seqlens[i + 1], so it starts
with 0, never falls, and ends with the number of tokens. Empty sequences are allowed.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def bounds(cu_seqlens: Int[Tensor, " n_plus_1"], num_tokens: int) -> list[int]:
    """cu_seqlens as a list of ints, checked: raises ValueError if it does not cut num_tokens into sequences."""
    cuts = cu_seqlens.tolist()
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != num_tokens or any(a > b for a, b in zip(cuts, cuts[1:])):
        raise ValueError(
            f"cu_seqlens must start with 0, never fall, and end with the number of packed tokens, {num_tokens}; "
            f"got {cuts if len(cuts) <= 12 else [*cuts[:6], '…', *cuts[-3:]]}."
        )
    return cuts


def buckets(cuts: list[int], device) -> Iterator[tuple[Tensor, Int[Tensor, "n l"], Bool[Tensor, "n l"]]]:
    """The sequences in groups of similar length: (which sequences, token index, which tokens are real).

    Lengths within a group differ by less than a factor of 2, so that padding a group to its longest at most
    doubles the work, however uneven the batch. Padded places point at the sequence's first token.
    """
    lengths = [b - a for a, b in zip(cuts, cuts[1:])]
    by_size: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        by_size.setdefault(n.bit_length(), []).append(i)
    for members in by_size.values():
        own = torch.tensor([lengths[i] for i in members], device=device)[:, None]
        start = torch.tensor([min(cuts[i], cuts[-1] - 1) for i in members], device=device)[:, None]
        place = torch.arange(max(lengths[i] for i in members), device=device)
        real = place < own
        yield torch.tensor(members, device=device), torch.where(real, start + place, start.clamp(min=0)), real
