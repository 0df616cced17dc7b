"""The build backend: scikit-build-core's, and what it doesn't do.

Where the kernels can't be compiled (no compiler, or one that is too old), the package is built without them and says
so; plain PyTorch serves then. TARNN_KERNELS=required makes that an error, and off leaves
them out on purpose. Metadata are never prepared apart from a wheel: its tag depends on whether they compile.

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
]

WITHOUT = """\
*** tarnn is built without its compiled kernels ({why}).
*** Attention on the CPU will run in plain PyTorch, several times slower. They need a C++ compiler (GCC 11 or newer,
*** or Clang): once there is one, run `pip install --force-reinstall --no-deps .` again.\
"""


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """With the kernels, for this platform; else without them, for any platform."""
    plain = {**(settings or {}), "wheel.cmake": "false"}
    return attempt(lambda: builder.build_wheel(directory, settings, metadata)) or builder.build_wheel(
        directory, plain, metadata
    )


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """A path to src/, and the kernels compiled into it; without them a library from before goes too."""
    if not attempt(compile_in_place):
        Path("src/tarnn/kernels/cpu/libtarnn_cpu.so").unlink(missing_ok=True)
    plain = {**(settings or {}), "wheel.cmake": "false", "editable.mode": "inplace"}
    return builder.build_editable(directory, plain, metadata)


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
