"""Sampling from mixtures of logistic distributions, as likelihoods of images need it for each value."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.kernels.contract import choose
from tarnn.kernels.mixture import Call
from tarnn.numerics import wide


def sample_mixture(
    parameters: Float[Tensor, "*n p"],
    log_scales: tuple[float, float],
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "*n"]:
    """A value 0 to 255 from each mixture of p/3 logistic distributions: logits, means and log-scales (kept within
    `log_scales`) on [−1, 1], one group after the other. temperature > 0 divides the logits and multiplies the scales.

    The same seed gives the same noise, whoever computes the values from it.
    """
    shape, dtype = parameters.shape[:-1], wide(parameters.dtype)
    exponential = parameters.new_empty(*shape, parameters.shape[-1] // 3, dtype=dtype).exponential_(generator=generator)
    uniform = torch.rand((*shape, 1), generator=generator, dtype=dtype, device=parameters.device)
    call = Call(parameters, exponential, uniform, temperature, *log_scales)
    return choose("mixture", call).forward(call)
