"""Images as examples for training."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tarnn.data.examples import Rows
from tarnn.tasks.images.sources import Images


class ImageRows(Rows):
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
