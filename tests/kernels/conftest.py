"""What the tests of the compiled kernels share."""

import pytest

from tarnn.kernels import cpu
from tarnn.kernels.cpu import library


@pytest.fixture
def compiled(poisoned_memory):
    """The compiled kernels serve, and tensors that aren't written hold NaN."""
    if not library.available():
        pytest.skip(library.status().why)


@pytest.fixture
def tiny(monkeypatch):
    """Chunks and stretches so small that a short sequence has many."""
    for name, size in {"CHUNK": 4, "CHUNK_WITH_CHANNELS": 3, "CHUNK_OF_MANY": 5, "STRETCH": 8}.items():
        monkeypatch.setattr(cpu, name, size)
