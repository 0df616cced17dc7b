"""The lesser instruction sets of the library compute what plain PyTorch does. The best runs in all other tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tarnn.kernels import native

TESTS = Path(__file__).parents[1]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("isa", native.ISAS[:-1])
def test_lesser_instruction_sets(isa):
    best = native.status().path.removeprefix("native, ")
    if native.ISAS.index(isa) > native.ISAS.index(best):
        pytest.skip(f"the best that this processor has is {best}")
    run = subprocess.run(
        [sys.executable, TESTS / "support/isa_against_eager.py"],
        env={**os.environ, "TARNN_ISA": isa, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.strip() == f"native, {isa}", run.stderr
