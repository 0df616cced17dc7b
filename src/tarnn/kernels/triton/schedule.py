"""How the positions of a call are divided: sequences into items, which programs work on, and items into chunks."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Schedule(NamedTuple):
    """Tables on the device, int32. Each program reads its row, so one kernel handles batches and packed rows."""

    items: Tensor  # (·, 5)  batch row, first position, last + 1, first chunk, sequence
    chunks: Tensor  # (·, 4)  batch row, first position, last + 1, sequence
    sequences: Tensor  # (n, 4)  first item, last + 1, first chunk, last + 1
    whole: bool  # every sequence is one item

    @property
    def num_items(self) -> int:
        return self.items.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.chunks.shape[0]


# tables that CUDA graphs read, which go on reading them: kept for ever
_RECORDED: dict[tuple, Schedule] = {}


def of_rows(num_rows: int, length: int, item: int, chunk: int, device: torch.device) -> Schedule:
    """Rows of one length each."""
    asked = num_rows, length, item, chunk, device
    tables = _RECORDED.get(asked) or _of_rows(*asked)
    if _recording():
        _RECORDED[asked] = tables
    return tables


def _recording() -> bool:
    """Whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _of_rows(num_rows: int, length: int, item: int, chunk: int, device: torch.device) -> Schedule:
    rows = torch.arange(num_rows, device="cpu")
    return _divided(rows, torch.zeros_like(rows), torch.full_like(rows, length), item, chunk, device)


def of_packed(cuts: list[int], item: int, chunk: int, device: torch.device) -> Schedule:
    """Sequences end to end in one row."""
    at = torch.tensor(cuts, device="cpu")
    return _divided(torch.zeros_like(at[1:]), at[:-1], at[1:], item, chunk, device)


def _divided(rows: Tensor, starts: Tensor, stops: Tensor, item: int, chunk: int, device) -> Schedule:
    """Items of `item` positions, a multiple of the `chunk`."""
    of_chunks, chunk_starts, chunk_stops, chunk_ends = _cut(starts, stops, chunk)
    of_items, item_starts, item_stops, item_ends = _cut(starts, stops, item)
    first_chunks = torch.nn.functional.pad(chunk_ends, (1, 0))[:-1]
    first_items = torch.nn.functional.pad(item_ends, (1, 0))[:-1]
    chunk_of_item = first_chunks[of_items] + (item_starts - starts[of_items]) // chunk
    tables = (
        torch.stack([rows[of_items], item_starts, item_stops, chunk_of_item, of_items], 1),
        torch.stack([rows[of_chunks], chunk_starts, chunk_stops, of_chunks], 1),
        torch.stack([first_items, item_ends, first_chunks, chunk_ends], 1),
    )
    whole = bool((item_ends - first_items == 1).all())
    items, chunks, sequences = (x.to(device, torch.int32) for x in tables)
    return Schedule(items, chunks, sequences, whole)


def _cut(starts: Tensor, stops: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pieces of at most `length`: which sequence each is of, its start, its stop; and where each sequence's pieces end."""
    counts = (stops - starts + length - 1) // length
    ends = counts.cumsum(0)
    of = torch.repeat_interleave(torch.arange(len(starts), device="cpu"), counts)
    begin = starts[of] + (torch.arange(len(of), device="cpu") - (ends - counts)[of]) * length
    return of, begin, torch.minimum(begin + length, stops[of]), ends
