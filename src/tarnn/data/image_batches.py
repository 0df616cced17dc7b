"""Images as examples for training and as batches for evaluation."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tarnn.data.images import Images


class ImageRows(Dataset):
    """All images of a source; a batch is one gather. `labelled`: with their classes."""

    def __init__(self, images: Images, labelled: bool):
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

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[0] for name, x in self.__getitems__([index]).items()}


def collate(rows):
    """What `__getitems__` gave is a batch already; single examples are stacked."""
    if isinstance(rows, dict):
        return rows
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class ImageSampler(Sampler[int]):
    """`num_samples` indices: epoch after epoch without a seam, each in a new order that (seed, epoch) alone decides."""

    def __init__(self, num_images: int, num_samples: int, seed: int):
        self.num_images, self.num_samples, self.seed = num_images, num_samples, seed

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.num_samples, 0
        while left > 0:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_images)[:left]
            yield from order.tolist()
            left -= len(order)
            epoch += 1


class ImageBatches(Sequence[dict[str, Tensor]]):
    """All images in order, each once, in batches."""

    def __init__(self, rows: ImageRows, batch_size: int):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.rows.__getitems__(range(len(self.rows))[i * self.batch_size : (i + 1) * self.batch_size])
