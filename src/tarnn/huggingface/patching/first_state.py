"""The state of a recurrent layer before the first token of a sequence: nothing, or what `starting` says.

It is asked for by recurrences that no cache gives a state. Rows that are packed get it for each of their sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# of the shape of a state without rows, as the op has it → that state; None: nothing
Start = Callable[[tuple[int, ...]], Tensor | None]
_START: ContextVar[Start | None] = ContextVar("start", default=None)


@contextmanager
def starting(start: Start) -> Iterator[None]:
    """Let recurrences that are called within begin from these states."""
    token = _START.set(start)
    try:
        yield
    finally:
        _START.reset(token)


def first_state(num_rows: int, bounds: Tensor | None, *shape: int) -> Tensor | None:
    """The first state of each sequence, (sequences, …), float32; None for nothing. bounds: of packed sequences, None: rows."""
    start = None if torch.compiler.is_compiling() else _START.get()
    S = None if start is None else start(shape)
    return None if S is None else S.expand(num_rows if bounds is None else len(bounds) - 1, *shape)
