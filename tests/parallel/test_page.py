"""The program of docs/parallel.md, as torchrun starts it."""

import os
import re
import subprocess
import sys

import pytest
from support.code_blocks import ROOT, blocks


@pytest.mark.slow
def test_its_program_prints_the_same_gradient_on_any_number_of_ranks(tmp_path):
    program, command, *_ = blocks(ROOT / "docs/parallel.md")
    (tmp_path / "long.py").write_text(program.text)
    name, *rest = command.text.split()
    assert name == "torchrun"
    printed = []
    for ranks in "12":
        rest[rest.index("--nproc-per-node") + 1] = ranks
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *rest],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed.append([float(x) for x in re.findall(r"\d+\.\d+", done.stdout)])
    assert (len(printed[0]), len(printed[1])) == (1, 2)
    assert printed[1] == pytest.approx(printed[0] * 2, rel=1e-5)
