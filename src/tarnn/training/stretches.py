"""Sequences cut over processes: each process of a group takes the same examples, and its own stretch of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Sampler

from tarnn.errors import UserError
from tarnn.parallel.group import sequence
from tarnn.parallel.layout import cut


class Stretches:
    """The place of this process among `processes`: which examples it reads, and which stretch of them.

    The processes of a group have neighbouring ranks, as in the inner dimension of a device mesh (readers, size).
    """

    def __init__(self, rank: int, processes: int, size: int):
        self.size, self.reader, self.readers = size, rank // size, processes // size
        # a group of its own, also where it is of all processes: gradients are summed by another one at the same time
        self.group = torch.distributed.new_subgroups(size)[0] if size > 1 else None

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this process's stretch of tensors (b, t)."""
        return batch if self.size == 1 else {name: cut(x, 1, self.group).contiguous() for name, x in batch.items()}

    def shortened(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the beginning of tensors (b, t), as long as a stretch, and the same on all processes."""
        return {name: x[:, : x.shape[1] // self.size] for name, x in batch.items()} if self.size > 1 else batch

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, ops take their inputs as stretches of longer sequences; UserError for one that can't."""
        if self.size == 1:
            yield
            return
        try:
            with sequence(self.group):
                yield
        except NotImplementedError as error:
            raise UserError(f"--sequence-parallel: {error}") from error


class RepeatedBatches(Sampler[int]):
    """The indices of another sampler, every batch of them `times` times in a row: once for each process of a group."""

    def __init__(self, indices: Sampler[int], batch_size: int, times: int):
        self.indices, self.batch_size, self.times = indices, batch_size, times

    def __len__(self) -> int:
        return len(self.indices) * self.times  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        batch: list[int] = []
        for index in self.indices:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield from batch * self.times
                batch = []
