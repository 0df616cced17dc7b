"""Examples in rows of one length: what is longer is cut, and short ones share a row, each with its own beginning.

Rows are packed by best fit, longest first. The model is told where each example begins, so nothing leaks from one to the next.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tarnn.tasks.text.windows import IGNORED
from tarnn.tuning.examples import Example


@dataclass
class Counts:
    """Count what became of the examples: all, cut at the end, divided into pieces, left out for want of learned tokens."""

    examples: int = 0
    cut: int = 0
    divided: int = 0
    left_out: int = 0

    def lines(self, length: int) -> list[str]:
        """Return sentences about those that are not whole."""
        of = f"of {self.examples:,} examples"
        return [
            *([f"{self.cut:,} {of} are longer than {length:,} tokens and were cut"] if self.cut else []),
            *([f"{self.divided:,} {of} are longer than {length:,} tokens and were divided"] if self.divided else []),
            *([f"{self.left_out:,} {of} have no token to learn and were left out"] if self.left_out else []),
        ]


def fitted(examples: Iterable[Example], length: int, counts: Counts) -> list[Example]:
    """Examples of at most `length` tokens that have something to learn: texts are divided, others lose their ends."""
    fitting = []
    for example in examples:
        counts.examples += 1
        pieces = [example]
        if len(example.ids) > length:
            starts = [0] if example.whole else range(0, len(example.ids), length)
            pieces = [
                Example(example.ids[i : i + length], example.learned[i : i + length], example.whole) for i in starts
            ]
            counts.cut, counts.divided = counts.cut + example.whole, counts.divided + (not example.whole)
        taken = [x for x in pieces if x.learned[1:].any()]
        counts.left_out += not taken
        fitting += taken
    return fitting


def packs(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the examples of each row: longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(free, (lengths[i], -1))
        left, row = free.pop(at) if at < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            insort(free, (left - lengths[i], row))
    return rows


class PackedRows(Dataset):
    """Rows for a model: input_ids, labels (`IGNORED` where nothing is learned) and position_ids, each (1, t)."""

    def __init__(self, examples: Sequence[Example], room: int, pack: bool = True):
        self.examples = examples
        self.rows = packs([len(x.ids) for x in examples], room) if pack else [[i] for i in range(len(examples))]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The tokens of the longest row."""
        return max(sum(len(self.examples[i].ids) for i in row) for row in self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen = [self.examples[i] for i in self.rows[index]]
        labels = [np.where(x.learned & (np.arange(len(x.ids)) > 0), x.ids, IGNORED) for x in chosen]
        parts: Mapping[str, Any] = {
            "input_ids": [x.ids for x in chosen],
            "labels": labels,
            "position_ids": [np.arange(len(x.ids)) for x in chosen],
        }
        return {name: torch.from_numpy(np.concatenate(x))[None] for name, x in parts.items()}


def bounds_of(positions: Tensor) -> Tensor:
    """Where the sequences of a row (1, t) begin, and where the last ends: int32 (n + 1,)."""
    starts = (positions[0] == 0).nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([positions.shape[1]])]).int()
