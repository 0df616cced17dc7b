"""Whether flash-linear-attention's kernels can compute here, and if not, why: the package, its version, the GPU.

Nothing here imports the package, or Triton, before the first call that they compute.
"""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from tarnn.kernels.contract import FixableRefusal
from tarnn.kernels.cpu.library import PLAIN, Status

VERSION = "0.6"  # of the package, whose functions the wrapper was tested with
OLDEST = (8, 0)  # compute capability: Ampere has bfloat16
MOST_CHANNELS = 256  # of queries and keys: the delta rule's kernels keep that many on the chip
REMEDY = "pip install 'tarnn[gpu]'"
ELSEWHERE = "flash-linear-attention computes on GPUs, and these tensors are elsewhere."
interpreted = False  # a switch for tests: tensors on a CPU too


@cache
def fla_version() -> str | None:
    """Return the version of the package that has the kernels, or None if it is not installed."""
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return None


@cache
def status(index: int) -> Status:
    """Return what computes linear attention and the delta rule on this GPU, and why."""
    if os.environ.get("TARNN_KERNELS") == "off":
        return Status(PLAIN, "switched off by TARNN_KERNELS=off")
    installed = fla_version()
    if installed is None or find_spec("triton") is None:
        missing = "flash-linear-attention" if installed is None else "Triton"
        return Status(PLAIN, f"{missing} is not installed: {REMEDY}")
    if not installed.startswith(f"{VERSION}."):
        return Status(PLAIN, f"tarnn calls flash-linear-attention {VERSION}, and this is {installed}: {REMEDY}")
    if torch.version.hip is not None:
        return Status(PLAIN, "flash-linear-attention is called on NVIDIA's GPUs only; on AMD's nothing was tried")
    capability = torch.cuda.get_device_capability(index)
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < OLDEST:
        return Status(PLAIN, f"bfloat16 needs a GPU of compute capability 8.0 (Ampere) or newer; this one is {name}")
    return Status(f"flash-linear-attention {installed}, {name}", "in bfloat16; other types take plain PyTorch")


def is_elsewhere(x: Tensor) -> bool:
    """Whether x is on no GPU of the kernels."""
    return not (x.is_cuda or interpreted)


def refusal(q: Tensor, v: Tensor, num_channels: int) -> str | None:
    """Return why the kernels can't compute a call with these queries, values, and channels of keys, or None."""
    if q.dtype != torch.bfloat16 or v.dtype != torch.bfloat16:
        return (
            "flash-linear-attention is taken for bfloat16 alone: it multiplies float32 as tf32, and keeps states of float16 in "
            f"float16, which overflow; got {q.dtype} and {v.dtype}."
        )
    if num_channels > MOST_CHANNELS:
        return f"flash-linear-attention's kernels hold at most {MOST_CHANNELS} channels of keys; got {num_channels}."
    if 0 in (*q.shape, *v.shape, num_channels):
        return "There is nothing for a kernel to do."
    if interpreted:
        return None
    path, why = status(q.device.index or 0)
    if path != PLAIN:
        return None
    sentence = f"On this GPU plain PyTorch computes: {why}."
    return sentence if why.startswith("switched off") else FixableRefusal(sentence)
