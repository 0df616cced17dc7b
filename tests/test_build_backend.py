"""What pip asks of the build backend: metadata without a compiler, and a wheel whose metadata are the same."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOKS = """
import backend
prepared = backend.prepare_metadata_for_build_{kind}("prepared")
print(prepared, backend.build_{kind}("built", None, f"prepared/{{prepared}}"))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of what is built, and a compiler that notes each call in `calls` and fails."""
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CMakeLists.txt",
        "src/tarnn/__init__.py",
        "src/tarnn/_version.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("build_backend", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "calls").touch()
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit 1\n')
    compiler.chmod(0o755)
    for name, value in {"CXX": str(compiler), "TARNN_KERNELS": "", "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run(checkout, *command):
    return subprocess.run([sys.executable, *command], cwd=checkout, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("options", [[], ["--editable"]], ids=["wheel", "editable"])
def test_preparing_metadata_calls_no_compiler(checkout, options):
    pip = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-build-isolation"]
    assert "Would install tarnn" in run(checkout, *pip, *options, ".")
    assert (checkout / "calls").read_text() == ""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_what_is_prepared_is_what_is_built(checkout, monkeypatch, kind):
    """Also that the compiler's calls are counted: building does call it."""
    monkeypatch.setenv("PYTHONPATH", str(checkout / "build_backend"))
    (checkout / "built").mkdir()
    prepared, wheel = run(checkout, "-c", HOOKS.format(kind=kind)).split()[-2:]
    assert (checkout / "calls").read_text() != ""
    with zipfile.ZipFile(checkout / "built" / wheel) as archive:
        for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
            assert archive.read(f"{prepared}/{name}") == (checkout / "prepared" / prepared / name).read_bytes()
