"""A value from each mixture of logistics by a compiled kernel (csrc/model_step/mixture.cpp): one call, not twenty."""

import torch
from torch import Tensor

from tarnn.kernels.cpu import library
from tarnn.kernels.plain import is_plain


def supports(parameters: Tensor) -> bool:
    """Whether the kernel is there for such parameters: float32 on a CPU, and nothing traces the call."""
    return is_plain(parameters) and parameters.is_cpu and parameters.dtype == torch.float32 and library.available()


def sample(
    parameters: Tensor, exponential: Tensor, uniform: Tensor, temperature: float, log_scales: tuple[float, float]
) -> Tensor:
    """parameters (…, 3·m), noise (…, m) from Exp(1) and (…, 1) from U[0, 1) → values (…) int64, 0 to 255.

    temperature > 0; log_scales: the bounds that they are kept within. Noise is contiguous.
    """
    values = torch.empty(uniform.shape[:-1], dtype=torch.int64, device="cpu")
    noise = exponential.view(-1, exponential.shape[-1])
    torch.ops.tarnn_cpu.sample_mixture(parameters.contiguous(), noise, uniform, temperature, *log_scales, values)
    return values
