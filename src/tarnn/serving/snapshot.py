"""A sequence where it stands: all that is needed to go on with it, and to know that it is this one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.models.state import ModelState

Tokens = Int[np.ndarray, " t"]
ALIGNMENT = 64  # bytes, a multiple of all types' sizes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of one row after `tokens`, and the logits of the token that comes next, (1, v) float32.

    A value: it is never written to, so any number of sequences that go on from here may share it. tokens: all of the sequence,
    int32, read or written alike; two snapshots of one model with the same tokens are the same to the last bit, if both are
    `proven`: a state that a client has sent, and what goes on from it, may be after other tokens than it says. So it is never
    found by its tokens. alone: no other sequence goes on from this object, so one may write behind its keys, which stay as they
    are; without it they are copied first.
    """

    state: ModelState
    logits: Float[Tensor, "1 v"]
    tokens: Tokens
    proven: bool = True
    alone: bool = False

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.logits.nbytes + self.tokens.nbytes


def plain_bytes(size: int) -> Tensor:
    """Return (size,) uint8 of any content, in memory of numpy, for states that are kept long.

    PyTorch aligns its memory, and a hole that an aligned tensor left is too small for the next one of its size in glibc's
    `malloc`, so a server would grow with every state that it makes and drops. numpy's memory is not aligned, and fills holes
    exactly.
    """
    return torch.from_numpy(np.empty(size, np.uint8))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous copies, all in one piece of memory."""
    starts = [0]
    for x in tensors:
        starts.append(starts[-1] + -(-x.nbytes // ALIGNMENT) * ALIGNMENT)
    piece = plain_bytes(starts[-1])
    copied = [piece[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(starts, tensors)]
    if copied:
        torch._foreach_copy_(copied, list(tensors))
    return copied
