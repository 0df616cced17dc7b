"""cosFormer: relu features, weighted by the cosine of a distance. The one map that depends on positions."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap, PositionalMap
from tarnn.feature_maps.registry import register
from tarnn.numerics import widest


@register("cosformer")
class CosFormer(PositionalMap):
    """φ(q_i)·φ(k_j) = relu(q_i)·relu(k_j) · cos(π(i − j)/2M), from φ(x_i) = (relu(x) cos θi, relu(x) sin θi).

    θ = π/2M; f = 2d. Weights are ≥ 0 for |i − j| ≤ M only, so M = `max_length` bounds the sequence. Near keys
    count more: good for local structure, bad for far retrieval. Qin et al. 2022, eq. 10 (arXiv 2202.08791).

    A map of positions as well: `LinearAttention` passes them by itself; with the functions write
    `linear_attention(q, k, v, phi.at(positions), causal=True)`, for `step` the same with its one position.

    Raises ValueError if max_length < 1, for more tokens than that, and where positions were not given.
    """

    def __init__(self, max_length: int):
        super().__init__()
        if max_length < 1:
            raise ValueError(f"CosFormer needs max_length ≥ 1; got {max_length}.")
        self.max_length = max_length

    def num_features(self, head_dim: int) -> int:
        return 2 * head_dim

    def at(self, positions: Int[Tensor, "#b t"] | Int[Tensor, " t"]) -> "CosFormerAt":
        """This map for tokens at these positions, (t,) or (b, t), from 0 to max_length − 1 (not checked)."""
        if positions.shape[-1] > self.max_length:
            raise ValueError(f"CosFormer was made for at most {self.max_length} positions; got {positions.shape[-1]}.")
        angle = positions.to(widest(positions.device)) * (torch.pi / (2 * self.max_length))
        angle = angle[..., None]  # (…, t, 1)
        return CosFormerAt(angle if positions.ndim == 1 else angle[:, None], self)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        raise ValueError("CosFormer needs to know where its tokens are: pass phi.at(positions) to the op.")

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"


class CosFormerAt(FeatureMap):
    """φ of x (…, t, d) at fixed positions."""

    def __init__(self, angle: Tensor, unplaced: CosFormer):
        super().__init__()
        self.cos, self.sin = angle.cos(), angle.sin()
        self.num_features = unplaced.num_features  # type: ignore[method-assign]

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        if x.shape[-2] != self.cos.shape[-2]:
            raise ValueError(f"CosFormer was told {self.cos.shape[-2]} positions; got {tuple(x.shape)}.")
        r = x.relu()
        return torch.cat([r * self.cos, r * self.sin], dim=-1).to(x.dtype)
