"""Deterministic parameter-free projection: sparse, positive, wider than its input."""

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register


@register("dpfp")
class Dpfp(FeatureMap):
    """φ(x) = [r ⊙ roll(r, 1), …, r ⊙ roll(r, ν)] with r = [relu(x), relu(−x)]; f = 2·ν·d.

    Both halves of r are relus, so every feature is ≥ 0 (a −relu(x) in the second half, as some libraries
    have it, makes features negative and the normaliser meaningless).
    Schlag, Irie and Schmidhuber 2021, eq. 37 (arXiv 2102.11174).

    Raises ValueError unless 1 ≤ nu (and, when applied, nu < 2·d: beyond it the features repeat).
    """

    def __init__(self, nu: int = 1):
        super().__init__()
        if nu < 1:
            raise ValueError(f"Dpfp needs nu ≥ 1; got {nu}.")
        self.nu = nu

    def num_features(self, head_dim: int) -> int:
        return 2 * self.nu * head_dim

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        if self.nu >= 2 * x.shape[-1]:
            raise ValueError(f"Dpfp needs nu < 2·head_dim = {2 * x.shape[-1]}; got nu = {self.nu}.")
        r = torch.cat([x.relu(), (-x).relu()], dim=-1)  # (…, 2d)
        return torch.cat([r * r.roll(j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
