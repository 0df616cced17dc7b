"""Based: the Taylor series of softmax's kernel to the second order, exactly."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register


@register("taylor")
class Taylor(FeatureMap):
    """φ(x)·φ(y) = 1 + s + s²/2 with s = scale·x·y: exp(s) near s = 0, and ≥ ½ everywhere.

    φ(x) = (1, √scale·x, scale·x_i²/√2, scale·x_i·x_j for i < j): each pair once, f = 1 + d + d(d + 1)/2. So
    head_dim is kept small (16 in the paper). s is not small for trained queries and keys, where the series is
    far from exp(s): the model is trained with this kernel, it does not approximate another.
    Arora et al. 2024, "Based" (arXiv 2402.18668). scale: by default 1/√d, as in softmax.

    Raises ValueError for a scale that is not above 0.
    """

    dot_product = True

    def __init__(self, scale: float | None = None):
        super().__init__()
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"Taylor needs a scale above 0; got {scale}.")
        self.scale = scale

    def num_features(self, head_dim: int) -> int:
        return 1 + head_dim + head_dim * (head_dim + 1) // 2

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        d = x.shape[-1]
        x = x * (d**-0.5 if self.scale is None else self.scale) ** 0.5
        i, j = torch.triu_indices(d, d, offset=1, device=x.device)
        return torch.cat([torch.ones_like(x[..., :1]), x, 0.5**0.5 * x.square(), x[..., i] * x[..., j]], dim=-1)
