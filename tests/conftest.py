"""What all suites share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """torch.empty is filled with NaN, so that an output that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
