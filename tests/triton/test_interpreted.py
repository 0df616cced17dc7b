"""The tests of `interpreted/`, in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run here themselves")
def test_interpreted():
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(FOLDER),
    ]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
