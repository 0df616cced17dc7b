"""flash-linear-attention for tensors on a CPU: its naive functions in place of kernels, or kernels in Triton's interpreter."""

import os

import pytest

from tarnn.kernels.fla import availability

# Triton decides when it is imported whether kernels are interpreted, so these tests have a process of their own, which
# test_interpreted.py starts: TRITON_INTERPRET=1 python -m pytest tests/gpu/interpreted
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture
def on_a_cpu(monkeypatch, poisoned_memory):
    """The backend takes tensors on a CPU; what isn't written is NaN."""
    monkeypatch.setattr(availability, "interpreted", True)
