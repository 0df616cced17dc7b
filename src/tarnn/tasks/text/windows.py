"""A long row of ids cut into windows of one context: examples for training, batches for evaluation."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tarnn.errors import UserError

IGNORED = -100  # a target that adds nothing to the loss, as in torch's cross_entropy


class Windows(Dataset):
    """All windows of `context` inputs and as many targets (the ids one place on); an index is a start.

    `ids` is a one-dimensional array of any integer type, mapped from disk or not. A batch is one gather:
    torch's loader calls `__getitems__` with all indices at once.
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

    def __getitem__(self, start: int) -> dict[str, Tensor]:
        return {name: x[0] for name, x in self.__getitems__([start]).items()}


class WindowSampler(Sampler[int]):
    """`num_samples` starts of windows: epoch after epoch without a seam, each in a new order.

    Within an epoch the windows lie end to end, so each token is a target once; where the first begins is
    drawn anew each epoch, so that a small text is not always cut at the same places. The order depends on
    (seed, epoch) alone, hence a resumed run skips to the very example that would have come next.
    """

    def __init__(self, windows: Windows, num_samples: int, seed: int):
        self.windows = windows
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.num_samples, 0
        while left > 0:
            starts = self.epoch(epoch)[:left]
            for i in range(0, len(starts), 1 << 16):  # Python's integers, some at a time
                yield from starts[i : i + (1 << 16)].tolist()
            left -= len(starts)
            epoch += 1

    def epoch(self, epoch: int) -> np.ndarray:
        """The starts of one epoch, in the order in which they come."""
        rng = np.random.default_rng([self.seed, epoch])
        context, starts = self.windows.context, len(self.windows)
        first = rng.integers(min(context, starts))
        count = 1 + (starts - 1 - first) // context
        return first + context * rng.permutation(count)


class ValidationBatches(Sequence[dict[str, Tensor]]):
    """Batches that have every id of `ids` but the first as a target exactly once, in order.

    The last window ends with the text; what it shares with the one before is IGNORED there. `context` must
    be below len(ids).
    """

    def __init__(self, ids: np.ndarray, context: int, batch_size: int):
        self.windows = Windows(ids, context)
        self.batch_size = batch_size
        last = len(self.windows) - 1
        self.starts = [*range(0, last, context), last]
        self.repeated = context - (last - self.starts[-2]) if last else 0

    def __len__(self) -> int:
        return -(-len(self.starts) // self.batch_size)

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        starts = self.starts[i * self.batch_size : (i + 1) * self.batch_size]
        batch = self.windows.__getitems__(starts)
        if i == len(self) - 1:
            targets = batch["targets"] = batch["targets"].clone()  # one row shares its memory with the inputs
            targets[-1, : self.repeated] = IGNORED
        return batch
