"""Tokens (b, t), padded or not, as rows of the fused step: those of one sequence, then those of the next."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Tokens without padding (n,), as a program's runtime takes them. real (b, t): which of the tokens they are."""

    ids: Tensor
    starts: Tensor
    slots: Tensor | None
    real: Tensor

    @property
    def sequences(self) -> Tensor:
        """The sequence of each token."""
        return torch.arange(len(self.real), device="cpu").repeat_interleave(self.starts.diff())

    def positions(self, first: Tensor) -> Tensor:
        """The position of each token, where `first` (b,) are those of the sequences' first."""
        return torch.arange(len(self.ids), device="cpu") + (first - self.starts[:-1])[self.sequences]


def rows_of(ids: Tensor, real: Tensor | None) -> Rows:
    """real (b, t): False for padding; None: there is none."""
    b, t = ids.shape
    if real is None:
        starts = torch.arange(0, b * t + 1, t, device="cpu")
        return Rows(ids.reshape(-1).contiguous(), starts, None, torch.ones(b, t, dtype=torch.bool, device="cpu"))
    starts = torch.nn.functional.pad(real.sum(-1).cumsum(0), (1, 0))
    slots = torch.cat([real.nonzero()[:, 1], torch.tensor([t], device="cpu")])
    return Rows(ids[real], starts, slots, real)


def check_tokens(token_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor | None]:
    """Tokens (b, t) int64, and which are not padding; None: all. Raises ValueError for anything but tokens of the vocabulary
    and a mask of their shape, and for a row without a token."""
    if token_ids.ndim != 2 or token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(
            f"prefill takes token ids (b, t), whole numbers; got {tuple(token_ids.shape)} of {token_ids.dtype}."
        )
    ids, real = token_ids.long(), None
    if attention_mask is not None:
        if attention_mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must be (b, t) = {tuple(ids.shape)}, 0 for padding; got {tuple(attention_mask.shape)}."
            )
        real = attention_mask.bool()
        ids = ids.masked_fill(~real, 0)
        if real.all():
            real = None
    if ids.shape[1] == 0 or (real is not None and not real.any(-1).all()):
        raise ValueError("the input is empty: each row needs at least one token.")
    if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < vocab_size):
        wrong = next(int(x) for x in (ids.min(), ids.max()) if not 0 <= x < vocab_size)
        raise ValueError(f"a token must be from 0 to {vocab_size - 1}; got {wrong}.")
    return ids, real
