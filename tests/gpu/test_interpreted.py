"""The tests of `interpreted/`, in a process of their own: Triton decides when it is imported whether kernels are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import fla


@pytest.mark.slow
def test_kernels_in_tritons_interpreter():
    fla.installed()
    folder = Path(__file__).parent / "interpreted"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", folder]
    done = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
