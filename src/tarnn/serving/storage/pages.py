"""Keys and values in pages of some tokens, which states share whose sequences begin alike.

A state of 20,000 tokens that follows another one of 19,000 takes memory, and time to be kept, for its last 1,000 alone.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.serving.snapshot import plain_bytes

Field = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, type and shape
PAGE = 512  # tokens


class Pages(NamedTuple):
    """The keys and values of the first tokens of a sequence. fields: the tensors of each page, (1, g, PAGE, d), one behind the
    other; data: each page's bytes, (n,) uint8, never written to again."""

    fields: tuple[Field, ...] = ()
    data: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.data)

    def tensors(self) -> list[dict[str, Tensor]]:
        """Views of each page's data, by name."""
        return [views(self.fields, x) for x in self.data]


def views(fields: Iterable[Field], data: Tensor) -> dict[str, Tensor]:
    """Return views of bytes in which these tensors lie one behind the other, by name."""
    found, start = {}, 0
    for name, dtype, shape in fields:
        end = start + dtype.itemsize * torch.Size(shape).numel()
        found[name] = data[start:end].view(dtype).view(shape)
        start = end
    return found


def in_pages(found: dict[str, Tensor], names: Collection[str], above: Pages) -> tuple[Pages, dict[str, Tensor]]:
    """Copy the whole pages of the tensors of these names, (1, g, t, d) of one t; return them, and all tensors without them.

    above: pages of a state whose tokens this one's begin with, or the other way round. Those that both have are shared.
    """
    grown = {name: x for name, x in found.items() if name in names}
    count = min((x.shape[2] // PAGE for x in grown.values()), default=0)
    if not count:
        return Pages(), found
    fields = tuple((name, x.dtype, (*x.shape[:2], PAGE, *x.shape[3:])) for name, x in grown.items())
    data = list(above.data[:count]) if above.fields == fields else []
    for start in range(len(data) * PAGE, count * PAGE, PAGE):
        data.append(joined([x[:, :, start : start + PAGE] for x in grown.values()]))
    rest = {name: x[:, :, count * PAGE :] if name in names else x for name, x in found.items()}
    return Pages(fields, tuple(data)), rest


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return the bytes of tensors one behind the other, a copy."""
    parts = [x.detach().reshape(-1).view(torch.uint8) for x in tensors if x.numel()]
    return torch.cat(parts, out=plain_bytes(sum(map(len, parts))))
