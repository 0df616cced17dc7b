"""csrc/torch.h declares what it uses of torch's C interface itself: it must be what torch's own headers declare."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).parents[2] / "csrc"
INCLUDE = Path(torch.__file__).parent / "include"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(
    COMPILER is None or not INCLUDE.is_dir(), reason="there is no C++ compiler, or no headers of torch's"
)


def compiles(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-fsyntax-only",
            "-DTORCH_TARGET_VERSION=0x020a000000000000",
            "-x",
            "c++",
            "-",
            "-I",
            CSRC,
            "-isystem",
            INCLUDE,
        ],
        input=source,
        capture_output=True,
        text=True,
    )


def test_declarations_are_torchs_own():
    """C functions of one name with other parameters or results don't compile; nor does a name that torch 2.10 lacks."""
    theirs = "#include <torch/csrc/stable/c/shim.h>\n"
    uses = "#define USE(name, parameters) auto* use_##name = &::name;\nTARNN_TORCH(USE)\n"
    assert (run := compiles(theirs + '#include "torch.h"\n' + uses)).returncode == 0, run.stderr
    without_ours = (CSRC / "torch.h").read_text().replace("TARNN_TORCH(TARNN_DECLARE)", "")
    assert (run := compiles(theirs + without_ours)).returncode == 0, run.stderr


def test_another_declaration_is_seen():
    wrong = 'extern "C" int torch_get_num_threads(long*);\n'
    run = compiles('#include "torch.h"\n' + wrong)
    assert run.returncode != 0
    assert "torch_get_num_threads" in run.stderr
