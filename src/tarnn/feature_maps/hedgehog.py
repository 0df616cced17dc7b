"""Hedgehog: a learnable softmax over features."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register
from tarnn.numerics import widen


@register("hedgehog")
class Hedgehog(FeatureMap):
    """φ(x) = [softmax(W x), softmax(−W x)] with a W for each head, which starts as the identity; f = 2·m.

    Features are positive and each half sums to 1: spiky and bounded, the two traits of softmax attention
    that the paper found to matter. The softmax is taken in float32 at least.
    Zhang et al. 2024 (arXiv 2402.04347); the two halves normalised apart, as in LoLCATs (arXiv 2410.10254).

    Takes (…, num_heads·r, t, d) for any r ≥ 1 (with fewer key heads, each W serves r query heads in a row),
    and one head's W for all where num_heads = 1. Raises ValueError where the heads or widths don't fit.
    """

    def __init__(self, head_dim: int, num_heads: int = 1, num_features: int | None = None):
        super().__init__()
        m = head_dim if num_features is None else num_features // 2
        if num_features is not None and (num_features < 2 or num_features % 2):
            raise ValueError(f"Hedgehog needs an even num_features ≥ 2 (two halves); got {num_features}.")
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.eye(m, head_dim).expand(num_heads, m, head_dim).clone())  # (h, m, d)

    def num_features(self, head_dim: int) -> int:
        return 2 * self.weight.shape[1]

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], None]:
        """Compute features in float32 at least: in float16 a softmax's small ones would become zeros."""
        heads = self.weight.shape[0]
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"this Hedgehog was made for head_dim = {self.head_dim}; got {tuple(x.shape)}.")
        weight = self.weight.to(x.dtype)
        if heads == 1:
            u = x @ weight[0].mT
        elif x.ndim < 3 or x.shape[-3] % heads:
            raise ValueError(f"Hedgehog with {heads} heads needs (…, {heads}·r, t, d); got {tuple(x.shape)}.")
        else:
            u = x @ weight.repeat_interleave(x.shape[-3] // heads, dim=0).mT  # (…, h, t, m)
        wide = widen(u)
        return torch.cat([wide.softmax(-1), (-wide).softmax(-1)], dim=-1), None

    def extra_repr(self) -> str:
        h, m, d = self.weight.shape
        return f"head_dim={d}, num_heads={h}, num_features={2 * m}"
