"""Float32 products on a CPU by oneDNN instead of MKL, torch's default on x86, whose kernels for AMD's processors are slower.

After `torch.set_float32_matmul_precision("medium")` torch hands float32 products to oneDNN and allows it to round their inputs
to bfloat16. oneDNN does so on processors with units for it (AMX); on others with AVX-512 it multiplies in float32, with 1.5
to 2.3 times the error of MKL (docs/decisions/2026-11-23-who-multiplies.md).
"""

import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

HIGHEST, FAST = "highest", "medium"  # torch's words: its default library, and oneDNN
VARIABLE = "TARNN_FAST_MATMUL"
LEAST = 2**24  # multiplications per product, below which calling oneDNN costs more than its kernels gain


class fast_matmul(AbstractContextManager):
    """Compute float32 products on the CPU by oneDNN if it multiplies in float32: from now on, or in a `with` block.

    It sets `torch.set_float32_matmul_precision` for the whole process; `why` says why, or why not. Nothing changes if a
    precision was set before, if there is an accelerator, or with TARNN_FAST_MATMUL=off (ValueError for an unknown value).

    size: multiplications of a typical product; of smaller ones than `LEAST` nothing changes.

        with tarnn.fast_matmul():
            model(input_ids)
    """

    def __init__(self, size: float = LEAST):
        reason = refusal(size)
        self.why = reason or "oneDNN in float32"
        self._entered = not reason
        if self._entered:
            torch.set_float32_matmul_precision(FAST)

    def __exit__(self, *error) -> None:
        if self._entered:
            torch.set_float32_matmul_precision(HIGHEST)
        self._entered = False


def refusal(size: float = LEAST) -> str:
    """Return why torch keeps its library for products of this size; "" if oneDNN computes them."""
    if (value := os.environ.get(VARIABLE, "")) not in ("", "on", "off"):
        raise ValueError(f"{VARIABLE}={value} is not known; expected on or off.")
    try:
        is_set = torch.get_float32_matmul_precision() != HIGHEST
    except RuntimeError:  # torch has no word for what was set by torch.backends
        is_set = True
    reasons = {
        f"torch's default, by {VARIABLE}=off": value == "off",
        "as set in torch before": is_set,
        "torch's default, since there is an accelerator": torch.accelerator.is_available(),
        "torch's default on this processor": torch.backends.cpu.get_cpu_capability() != "AVX512" or _rounds(),
        "torch's default, since products are small": size < LEAST,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _rounds() -> bool:
    """Return whether oneDNN would round inputs to bfloat16, or was not built in."""
    return torch.cpu._is_amx_tile_supported() or not torch.backends.mkldnn.is_available()


def product_size(model: nn.Module, rows: int) -> float:
    """Return the multiplications of a typical product of a model's weights with `rows` tokens: their mean."""
    layers = (layer for layer in model.modules() if not isinstance(layer, nn.Embedding))
    weights = (getattr(layer, "weight", None) for layer in layers)
    sizes = {
        weight.shape: rows * weight.numel() for weight in weights if isinstance(weight, Tensor) and weight.ndim == 2
    }
    return sum(sizes.values()) / max(1, len(sizes))
