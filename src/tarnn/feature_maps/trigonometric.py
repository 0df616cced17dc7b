"""Random Fourier features of the Gaussian kernel and, through it, of softmax's. They may be negative."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.draws import RandomFeatureMap, SoftmaxKernelMap
from tarnn.feature_maps.registry import register
from tarnn.numerics import full_precision, widen


class _Fourier(RandomFeatureMap):
    """(sin ω·x, cos ω·x)/√m for the m draws; f = 2m."""

    positive = False

    def __init__(self, head_dim: int, num_features: int, **draws: Any):
        if num_features % 2:
            name = type(self).__name__
            raise ValueError(f"{name} makes features in pairs: num_features must be even; got {num_features}.")
        super().__init__(head_dim, num_features // 2, **draws)

    def num_features(self, head_dim: int) -> int:
        return 2 * self.num_draws

    def waves(self, x: Tensor, factor: float) -> Tensor:
        """Compute (sin, cos)/√m of ω·(factor x), in float32 at least."""
        self.check_width(x)
        x = widen(x) * factor
        with full_precision(x):
            u = x @ self.omega.to(x.dtype).mT
        return torch.cat([u.sin(), u.cos()], dim=-1) / self.num_draws**0.5


@register("gaussian")
class GaussianRandomFeatures(_Fourier):
    """φ(x) = (sin(ω·x/σ), cos(ω·x/σ))/√m: E φ(x)·φ(y) = exp(−|x − y|²/2σ²), the Gaussian kernel.

    The estimates may be negative, so they go with `normalize=False`. Rahimi and Recht 2007; orthogonal
    directions: Yu et al. 2016 (arXiv 1610.09072). `sigma`: σ. Other arguments as `draw_omega`.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        sigma: float = 1.0,
        directions: str = "orthogonal",
        norms: str = "chi",
        seed: int | None = None,
    ):
        if not 0 < sigma < math.inf:
            raise ValueError(f"GaussianRandomFeatures needs a sigma above 0; got {sigma}.")
        super().__init__(head_dim, num_features, directions=directions, norms=norms, seed=seed)
        self.sigma = sigma

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], None]:
        return self.waves(x, 1 / self.sigma), None


@register("trigonometric")
class TrigonometricRandomFeatures(SoftmaxKernelMap, _Fourier):
    """φ(x) = e^(|x|²/2)/√m · (sin ω₁·x, …, cos ω₁·x, …): unbiased for exp(x·y), but with either sign.

    Its variance, (1/2m) e^(|x+y|²) e^(−2x·y) (1 − e^(−|x−y|²))², is largest where the kernel is small, which in
    attention is almost everywhere: sums of weights come out zero or negative and training breaks (figure 5 of
    the paper, NaN in its appendix D.3). It is here to be compared with; use it with `normalize=False`.

    x and y are multiplied by √scale first, as by the positive features.
    Choromanski et al. 2021, eq. 5 and lemma 2 (arXiv 2009.14794); Peng et al. 2021 (arXiv 2103.02143) take
    vectors of norm 1 for it, where it does well.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        scale: float | None = None,
        directions: str = "orthogonal",
        norms: str = "chi",
        seed: int | None = None,
    ):
        super().__init__(head_dim, num_features, scale=scale, directions=directions, norms=norms, seed=seed)

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        waves = self.waves(x, self.scale**0.5)
        scale = 0.5 * self.scale * x.to(waves.dtype).square().sum(-1)
        constant = scale.detach()
        return waves * (scale - constant).exp()[..., None], constant  # the first factor is 1, with a gradient
