"""Whether the kernels run here, and if not, why: Triton, its version, the GPU."""

import os
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from tarnn.kernels.contract import Mendable

VERSIONS = ("3.6", "3.7")  # of Triton, that the kernels' tests pass with: those of torch 2.10 to 2.13
OLDEST = (8, 0)  # compute capability: Ampere has tf32 and bfloat16
PLAIN = "PyTorch"
REMEDY = 'install them by `pip install "tarnn[triton]"`'
EXPERIMENTAL = "experimental: on an H100 not all laws of precision held"
interpreted = False  # a switch for tests: CPU tensors too, by Triton's interpreter


class Status(NamedTuple):
    path: str  # "Triton 3.7.1, sm_90", or PLAIN
    why: str


@cache
def triton_version() -> str | None:
    """Of the package that is installed; it isn't imported for this."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


@cache
def status(index: int) -> Status:
    """Which path calls on this GPU take, and why."""
    if os.environ.get("TARNN_KERNELS") == "off":
        return Status(PLAIN, "switched off by TARNN_KERNELS=off")
    found = triton_version()
    if found is None:
        return Status(PLAIN, f"Triton is not installed: {REMEDY}")
    if not found.startswith(tuple(f"{version}." for version in VERSIONS)):
        return Status(
            PLAIN, f"the kernels are tested with Triton {' and '.join(VERSIONS)}, and this is {found}: {REMEDY}"
        )
    if torch.version.hip is not None:
        return Status(PLAIN, "the kernels are for NVIDIA's GPUs; for AMD's they compile, and nobody has run them")
    capability = torch.cuda.get_device_capability(index)
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < OLDEST:
        return Status(PLAIN, f"the kernels need a GPU of compute capability 8.0 (Ampere) or newer; this one is {name}")
    return Status(f"Triton {found}, {name}", EXPERIMENTAL)


def refusal(device: torch.device) -> str | None:
    """Why no call on this device is computed here, or None."""
    if device.type == "cpu" and interpreted:
        return None
    if device.type != "cuda":
        return f"Triton's kernels are for NVIDIA's GPUs; got tensors on {device}."
    path, why = status(device.index or 0)
    if path != PLAIN:
        warn_experimental()
        return None
    sentence = f"Attention on the GPU runs in plain PyTorch: {why}."
    return sentence if why.startswith("switched off") else Mendable(sentence)


@cache
def warn_experimental() -> None:
    """Say once per process that these kernels are unproven on hardware, and how to do without them."""
    warnings.warn(
        f"tarnn's GPU kernels are {EXPERIMENTAL}. Compare results with TARNN_KERNELS=off, which takes plain PyTorch.",
        stacklevel=4,
    )
