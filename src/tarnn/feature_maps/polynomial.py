"""The polynomial kernel of degree 2, exactly."""

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register


@register("polynomial2")
class Polynomial2(FeatureMap):
    """φ(x)·φ(y) = (x·y + offset)² exactly; f = d(d+1)/2, and d + 1 more with an offset.

    φ(x) lists x_i² and √2·x_i·x_j for i < j (and √(2·offset)·x_i, offset): each pair once, which is half of
    the outer product x ⊗ x. Features may be negative, their products never are;
    but where a query is orthogonal to all its keys they cancel to rounding noise, and normalised output is noise
    too: an offset > 0 keeps the sum away from zero. Costs O(t·d²·e), less than
    softmax where t > d² (Katharopoulos et al. 2020, section 3.2.1, arXiv 2006.16236).

    Raises ValueError if offset < 0, which is no kernel.
    """

    dot_product = True

    def __init__(self, offset: float = 0.0):
        super().__init__()
        if not offset >= 0:
            raise ValueError(f"Polynomial2 needs offset ≥ 0 for (x·y + offset)² to be a kernel; got {offset}.")
        self.offset = offset

    def num_features(self, head_dim: int) -> int:
        return head_dim * (head_dim + 1) // 2 + (head_dim + 1 if self.offset else 0)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        d = x.shape[-1]
        i, j = torch.triu_indices(d, d, offset=1, device=x.device)
        parts = [x.square(), 2**0.5 * x[..., i] * x[..., j]]
        if self.offset:
            parts += [(2 * self.offset) ** 0.5 * x, torch.full_like(x[..., :1], self.offset)]
        return torch.cat(parts, dim=-1)
