"""Sinusoidal embeddings of positions."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tarnn.numerics import widest


def sinusoidal(positions: Int[Tensor, "*b"], dim: int) -> Float[Tensor, "*b dim"]:
    """Compute [sin(p·ω_c), cos(p·ω_c)] with ω_c = 10000^(−2c/dim), c < dim/2 (Vaswani et al. 2017, section 3.5).

    Angles are float64 where the device has it, since a float32 p·ω at p = 10⁶ is off by 0.03.
    """
    dtype = widest(positions.device)
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / -dim
    angle = positions[..., None].to(dtype) * 10000.0**exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


class SinusoidalPositions(nn.Module):
    """`sinusoidal` as a module: computed when needed, for positions of any size."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, positions: Int[Tensor, "b t"]) -> Float[Tensor, "b t dim"]:
        return sinusoidal(positions, self.dim)

    def extra_repr(self) -> str:
        return str(self.dim)
