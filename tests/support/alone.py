"""Programs in C++ beside the tests, which need neither torch nor Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(name: str, folder: Path, *options: str | Path) -> Path:
    """Compile tests/kernels/NAME.cpp into a folder; skip the test without a compiler."""
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    source, program = ROOT / f"tests/kernels/{name}.cpp", folder / name
    subprocess.run([compiler, "-std=c++20", "-I", ROOT / "csrc", source, *options, "-o", program], check=True)
    return program


def output(*command: str | Path) -> str:
    """Run a program and return what it prints, without the last line's end."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
