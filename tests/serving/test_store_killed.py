"""A process that is killed at any moment loses no state that it was told is held."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "rounds", [pytest.param(3, marks=pytest.mark.thorough), pytest.param(20, marks=pytest.mark.slow)]
)
def test_no_acknowledged_state_is_lost(tmp_path, rounds):
    command = [sys.executable, "-m", "support.killed_store", str(tmp_path / "states"), str(rounds)]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    held, deleted = map(int, run.stdout.split())
    assert held > rounds
    assert deleted > 0
