"""The lesser instruction sets of the library compute what plain PyTorch does. The best runs in all other tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tarnn.kernels.cpu import library

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("isa", library.ISAS[:-1])
def test_lesser_instruction_sets(isa):
    best = library.status().path.removeprefix("compiled, ")
    if library.ISAS.index(isa) > library.ISAS.index(best) or (isa == "baseline") != (best == "baseline"):
        pytest.skip(f"the best that this processor has is {best}, and x86-64 has no baseline")
    run = subprocess.run(
        [sys.executable, TESTS / "support/isa_against_eager.py"],
        env={**os.environ, "TARNN_ISA": isa, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == f"compiled, {isa}", run.stderr
