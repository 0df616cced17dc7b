"""Masked tokens: which are hidden, and what stands in their place."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tarnn.tasks.text.windows import IGNORED, Windows, WindowSampler


@dataclass(frozen=True)
class Masking:
    """Each token is chosen with `probability`; of those chosen 80 % become the mask, 10 % any other token, 10 % stay.

    Devlin et al. 2019, section 3.1 (arXiv 1810.04805). special: ids that are never chosen, nor put in a place.
    """

    probability: float
    mask_id: int
    num_ids: int
    special: frozenset[int]
    seed: int

    def __call__(self, ids: np.ndarray, *number: int) -> tuple[np.ndarray, np.ndarray]:
        """(what the model reads, labels: the tokens that were chosen, −100 elsewhere) of ids (t,).

        The choice depends on the seed and on `number` alone. At least one token is chosen, where any may be.
        """
        rng = np.random.default_rng([self.seed, *number])
        allowed = ~np.isin(ids, list(self.special))
        chosen = allowed & (rng.random(len(ids)) < self.probability)
        if not chosen.any() and allowed.any():
            chosen[rng.choice(np.flatnonzero(allowed))] = True
        fate = rng.random(len(ids))
        plain = np.setdiff1d(np.arange(self.num_ids), list(self.special))
        others = rng.choice(plain, len(ids))
        read = np.where(chosen & (fate < 0.8), self.mask_id, np.where(chosen & (fate < 0.9), others, ids))
        return read, np.where(chosen, ids, IGNORED)


class MaskedWindows(Windows):
    """Windows of `context` ids with some of them masked. An index is a start, plus len(self) for each epoch: its masks
    are others in each."""

    def __init__(self, ids: np.ndarray, context: int, masking: Masking):
        super().__init__(ids, context)
        self.masking = masking

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        pairs = [divmod(number, len(self)) for number in numbers]
        rows = super().__getitems__([start for _, start in pairs])["input_ids"].numpy()
        masked = [self.masking(row, *pair) for row, pair in zip(rows, pairs)]
        read, labels = (torch.from_numpy(np.stack(x)) for x in zip(*masked))
        return {"input_ids": read, "labels": labels}


class MaskedSampler(WindowSampler):
    """`WindowSampler` of `MaskedWindows`."""

    def epoch(self, epoch: int) -> np.ndarray:
        return super().epoch(epoch) + epoch * len(self.windows)
