"""Values from mixtures of logistics by a compiled kernel (csrc/draws/mixture.cpp): one call, not twenty."""

import torch
from torch import Tensor

from tarnn.kernels.cpu import library
from tarnn.kernels.mixture import Call
from tarnn.kernels.tracing import is_untraced


def refusal(call: Call) -> str | None:
    """Why the compiled kernel can't compute this call, or None."""
    if not is_untraced(call.parameters):
        return "A traced call is computed in plain PyTorch."
    if not call.parameters.is_cpu or call.parameters.dtype != torch.float32:
        return "The compiled sampler takes float32 on a CPU."
    return library.refusal()


def forward(call: Call) -> Tensor:
    """Values (…) int64."""
    values = torch.empty(call.uniform.shape[:-1], dtype=torch.int64, device="cpu")
    noise = call.exponential.view(-1, call.exponential.shape[-1])
    parameters, bounds = call.parameters.contiguous(), (call.least, call.most)
    torch.ops.tarnn_cpu.sample_mixture.default(parameters, noise, call.uniform, call.temperature, *bounds, values)
    return values
