"""A long row of ids cut into windows of one context, for training and evaluation; and masked tokens in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tarnn.data.examples import Batches, EpochSampler, Rows
from tarnn.errors import UserError

IGNORED = -100  # a target that adds nothing to the loss, as in torch's cross_entropy


class Windows(Rows):
    """All windows of `context` inputs and as many targets (the ids one place on); an index is a start.

    `ids` is a one-dimensional array of any integer type, mapped from disk or not. A batch is one gather.
    """

    def __init__(self, ids: np.ndarray, context: int):
        if context < 1:
            raise UserError(f"a context of {context} has nothing to train on; expected --context 1 or more.")
        if len(ids) < context + 1:
            raise UserError(
                f"the training text has {len(ids):,} tokens, fewer than one context of {context:,} and the "
                f"token after it; give more text or a --context below {max(len(ids), 2):,}."
            )
        self.ids = np.asarray(ids)  # a plain view of a memmap: its own __getitem__ is slow
        self.context = context
        self._offsets = np.arange(context + 1)

    def __len__(self) -> int:
        return len(self.ids) - self.context

    def __getitems__(self, starts: Sequence[int]) -> dict[str, Tensor]:
        """Inputs and targets, each (b, context): target i is the id after input i."""
        rows = torch.from_numpy(self.ids[np.asarray(starts)[:, None] + self._offsets].astype(np.int64))
        return {"input_ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class WindowSampler(EpochSampler):
    """Starts of windows, epoch after epoch.

    Within an epoch the windows lie end to end, so each token is a target once; where the first begins is
    drawn anew each epoch, so that a small text is not always cut at the same places. The order depends on
    (seed, epoch) alone, hence a resumed run skips to the very example that would have come next.
    """

    def __init__(self, windows: Windows, num_samples: int, seed: int):
        super().__init__(len(windows), num_samples, seed)
        self.windows = windows

    def epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        context, starts = self.windows.context, len(self.windows)
        first = rng.integers(min(context, starts))
        count = 1 + (starts - 1 - first) // context
        return first + context * rng.permutation(count)


class ValidationBatches(Batches):
    """Batches that have every id of `ids` but the first as a target exactly once, in order.

    The last window ends with the text; what it shares with the one before is IGNORED there. `context` must
    be below len(ids).
    """

    def __init__(self, ids: np.ndarray, context: int, batch_size: int):
        windows = Windows(ids, context)
        last = len(windows) - 1
        super().__init__(windows, batch_size, [*range(0, last, context), last])
        self.repeated = context - (last - self.order[-2]) if last else 0

    def __getitem__(self, i):
        batch = super().__getitem__(i)
        if i == len(self) - 1:
            targets = batch["targets"] = batch["targets"].clone()  # one row shares its memory with the inputs
            targets[-1, : self.repeated] = IGNORED
        return batch


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
