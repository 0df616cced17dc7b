"""Examples of any kind: padded to a batch, drawn epoch after epoch, and all of them in order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler


class Rows(Dataset):
    """Examples of which `__getitems__` makes a batch at once, as torch's loader asks for it."""

    def __getitems__(self, index: Sequence[int]) -> dict[str, Tensor]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[0] for name, x in self.__getitems__([index]).items()}


class PaddedRows(Rows):
    """Rows of arrays whose first axis may differ from row to row; a batch is filled up to its longest.

    fill: by the names of such arrays, what they are filled with, the input first. Its mask becomes the batch's
    attention_mask: 0 where it was filled up. Names that are not in `fill` are numbers or arrays of one size.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], fill: Mapping[str, float]):
        self.rows, self.fill = rows, fill
        self.input = next(iter(fill))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, index: Sequence[int]) -> dict[str, Tensor]:
        rows = [self.rows[i] for i in index]
        batch = {}
        for name in rows[0]:
            values = [np.asarray(row[name]) for row in rows]
            if name not in self.fill:
                batch[name] = torch.from_numpy(np.stack(values))
                continue
            shape = (len(values), max(map(len, values)), *values[0].shape[1:])
            filled = np.full(shape, self.fill[name], values[0].dtype)
            for place, value in zip(filled, values):
                place[: len(value)] = value
            batch[name] = torch.from_numpy(filled)
        lengths = torch.tensor([len(row[self.input]) for row in rows])
        batch["attention_mask"] = (torch.arange(batch[self.input].shape[1]) < lengths[:, None]).long()
        return batch


class ImageRows(Rows):
    """All images of a source (`tarnn.tasks.images.Images`); a batch is one gather. `labelled`: with their classes."""

    def __init__(self, images: Any, labelled: bool):
        self.images = images
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, index: Sequence[int]) -> dict[str, Tensor]:
        """`pixel_values` uint8 (b, height, width, channels), and `class_labels` int64 (b,) where labelled."""
        rows = np.asarray(index)
        batch = {"pixel_values": torch.from_numpy(self.images.pixels[rows])}
        if self.labelled:
            assert self.images.labels is not None
            batch["class_labels"] = torch.from_numpy(self.images.labels[rows])
        return batch


def collate(rows):
    """Stack single examples; a batch of `__getitems__` stays as it is."""
    if isinstance(rows, dict):
        return rows
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class EpochSampler(Sampler[int]):
    """`num_samples` indices: epoch after epoch without a seam, each in a new order that (seed, epoch) alone decides."""

    def __init__(self, num_examples: int, num_samples: int, seed: int):
        self.num_examples, self.num_samples, self.seed = num_examples, num_samples, seed

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.num_samples, 0
        while left > 0:
            order = self.epoch(epoch)[:left]
            for i in range(0, len(order), 1 << 16):  # Python's integers, some at a time
                yield from order[i : i + (1 << 16)].tolist()
            left -= len(order)
            epoch += 1

    def epoch(self, epoch: int) -> np.ndarray:
        """The indices of one epoch, in the order in which they come."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)


class Batches(Sequence[dict[str, Tensor]]):
    """Examples in order, each once, in batches: all of them, or those of `index`."""

    def __init__(self, rows: Any, batch_size: int, index: Sequence[int] | None = None):
        self.rows, self.batch_size = rows, batch_size
        self.order = range(len(rows)) if index is None else index

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.rows.__getitems__(self.order[i * self.batch_size : (i + 1) * self.batch_size])
