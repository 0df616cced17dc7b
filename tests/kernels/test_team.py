"""The helpers of a fused step, without Python (team_alone.cpp). ThreadSanitizer runs the same in tests/sanitize.sh."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_task_runs_once_and_a_long_stop_is_soon_forgotten(tmp_path):
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "team"
    sources = [ROOT / "tests/kernels/team_alone.cpp", ROOT / "csrc/runtime/team.cpp"]
    subprocess.run([compiler, "-std=c++20", "-pthread", "-I", ROOT / "csrc", *sources, "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True).stdout == "fine\n"
