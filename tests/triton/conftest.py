"""Kernels for GPUs are proven on a CPU: run by Triton's interpreter made honest, and compiled for GPUs that aren't there."""

import os

# Triton decides when it is imported whether kernels are interpreted, so these tests have a process of their own
# (`make nightly` starts it): TRITON_INTERPRET=1 python -m pytest tests/triton/interpreted
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
