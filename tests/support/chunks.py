"""Chunks so small that a short sequence has many of them, and many segments and stretches."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from tarnn.kernels.cpu import linear as cpu, recurrent
from tarnn.kernels.eager import delta, low_rank_delta, recurrence, segments

TINY = {
    "CHUNK": 4,
    "CHUNK_WITH_CHANNELS": 3,
    "CHUNK_OF_MANY": 5,
    "BLOCK": 8,
    "KEPT_EVERY": 8,
    "SEGMENT": 0,
    "SEGMENT_MIN": 8,
    "STRETCH": 8,
}
BACKENDS = (cpu, segments, delta, low_rank_delta, recurrence, recurrent)  # the modules that know how large chunks are


@contextlib.contextmanager
def tiny_chunks() -> Iterator[None]:
    """The usual sizes are back afterwards, whatever happens."""
    with contextlib.ExitStack() as stack:
        for module in BACKENDS:
            sizes = {name: TINY[name] for name in TINY.keys() & vars(module).keys()}
            stack.enter_context(mock.patch.multiple(module, **sizes))
        yield
