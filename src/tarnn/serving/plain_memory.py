"""Memory for what is kept long, among much that is not: holes in it can be used again.

PyTorch aligns its memory, and a hole that an aligned tensor left is too small for the next one of its size in glibc's `malloc`,
so that a server grows with every state that it makes and drops. numpy's memory is not aligned, and fills holes exactly.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PLACE = 64  # bytes, a multiple of all types' sizes


def plain_bytes(size: int) -> Tensor:
    """(size,) uint8, of any content."""
    return torch.from_numpy(np.empty(size, np.uint8))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies, all in one piece of memory."""
    places = [0]
    for x in tensors:
        places.append(places[-1] + -(-x.nbytes // PLACE) * PLACE)
    piece = plain_bytes(places[-1])
    made = [piece[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(places, tensors)]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made
