"""How tarnn is installed: metadata without a compiler, a wheel whose metadata are the same, versions from a lock."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
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


def test_a_version_that_cannot_be_had_is_named_with_the_remedy(tmp_path):
    lock = tmp_path / "lock.txt"
    lock.write_text("pytest==0.0.1\n")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "LOCK": str(lock)}
    command = ["scripts/pip_install.sh", sys.executable, "--dry-run", "pytest"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert said.returncode == 1
    sentence = said.stderr.splitlines()[-1]
    assert sentence.startswith(f"pip can't install pytest==0.0.1, which {lock} names, with Python 3.")
    assert "make install LOCK=" in sentence


def test_the_lock_has_every_package_once_with_its_version_alone():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    names = [line.split("==")[0] for line in lines]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", line) for line in lines)
    assert lines == sorted(lines)
    assert len(names) == len(set(names))
    assert not any(name == "tarnn" or name.startswith(("nvidia-", "cuda-")) for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # none is at hand
    extras = {name: extra for name, extra in project["optional-dependencies"].items() if name != "gpu"}
    required = [*project["dependencies"], *(x for extra in extras.values() for x in extra)]
    assert {re.match(r"[\w-]+", x)[0] for x in required} - {"tarnn"} <= set(names)


def test_the_readme_names_the_versions_that_are_admitted():
    readme = (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.search(r"transformers>=5\.(\d+),<5\.(\d+)", str(project["optional-dependencies"]["hf"])).groups()
    assert f"transformers 5.{low} to 5.{int(high) - 1}" in readme
    assert f"torch {re.search(r'torch>=([0-9.]+)', str(project['dependencies']))[1]} to" in readme
