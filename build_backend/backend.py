"""The build backend: scikit-build-core's, and what it doesn't do.

Where the kernels can't be compiled (no compiler, or one that is too old), the package is built without them and says
so; plain PyTorch serves then. TARNN_KERNELS=required makes that an error, and off leaves
them out on purpose. Preparing metadata compiles nothing; `build_wheel` decides the wheel's tag, since that depends on
whether the kernels compile.

An editable installation has its kernels in the source tree, compiled by the commands that CONTRIBUTING.md gives.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scikit_build_core import build as builder
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from scikit_build_core.errors import ScikitBuildError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

WITHOUT = """\
*** tarnn is built without its compiled kernels ({why}).
*** Attention on the CPU will run in plain PyTorch, several times slower. They need a C++ compiler (GCC 11 or newer,
*** or Clang): once there is one, run `pip install --force-reinstall --no-deps .` again.\
"""

PLAIN = {"wheel.cmake": "false"}


def prepare_metadata_for_build_wheel(directory: str, settings: dict[str, Any] | None = None) -> str:
    """Write METADATA, and a WHEEL file that names no platform yet; no compiler and no CMake is looked for."""
    return builder.prepare_metadata_for_build_wheel(directory, {**(settings or {}), **PLAIN})


def prepare_metadata_for_build_editable(directory: str, settings: dict[str, Any] | None = None) -> str:
    """Write the same for an editable installation."""
    return builder.prepare_metadata_for_build_editable(directory, {**(settings or {}), **PLAIN})


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """With the kernels, for this platform; else without them, for any platform.

    scikit-build-core never sees `metadata`: it refuses a wheel whose tag differs from the prepared one.
    """
    return attempt(lambda: builder.build_wheel(directory, settings)) or builder.build_wheel(
        directory, {**(settings or {}), **PLAIN}
    )


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """A path to src/, and the kernels compiled into it; without them a library from before goes too."""
    if not attempt(compile_in_place):
        Path("src/tarnn/kernels/cpu/libtarnn_cpu.so").unlink(missing_ok=True)
    return builder.build_editable(directory, {**(settings or {}), **PLAIN, "editable.mode": "inplace"})


def attempt(compiling: Callable[[], str]) -> str:
    """What `compiling` gives; "" where it fails or isn't wished for, after saying so."""
    wish = os.environ.get("TARNN_KERNELS", "")
    if wish not in ("", "off", "required"):
        raise SystemExit(f"TARNN_KERNELS is off or required, or not set; got {wish!r}.")
    why = "TARNN_KERNELS=off"
    if wish != "off":
        try:
            return compiling()
        except (SystemExit, ScikitBuildError, OSError, subprocess.CalledProcessError) as error:
            if wish == "required":
                raise
            why = "see above" if isinstance(error, SystemExit) else str(error)
    print(WITHOUT.format(why=why), file=sys.stderr)
    return ""


def compile_in_place() -> str:
    """CMake, of this environment or the system."""
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(places)}
    cmake, ninja = (shutil.which(name, path=environment["PATH"]) for name in ("cmake", "ninja"))
    if not cmake:
        raise FileNotFoundError("there is no cmake")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    for command in (
        ["-S", ".", "-B", "build/editable", "-DTARNN_IN_PLACE=ON", *generator],
        ["--build", "build/editable", "--parallel"],
    ):
        subprocess.run([cmake, *command], check=True, env=environment)
    return "compiled"
