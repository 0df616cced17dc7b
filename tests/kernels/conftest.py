"""What the tests of the compiled kernels share."""

import pytest
from support.chunks import tiny_chunks

from tarnn.kernels.cpu import library


@pytest.fixture
def compiled(poisoned_memory):
    """The compiled kernels serve, and tensors that aren't written hold NaN."""
    if not library.available():
        pytest.skip(library.status().why)


@pytest.fixture
def tiny():
    """Chunks and stretches so small that a short sequence has many."""
    with tiny_chunks():
        yield
