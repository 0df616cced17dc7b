"""Positive random features of the softmax kernel: FAVOR+, its hyperbolic form, and SMREG.

    exp(x·y) = E_ω φ(x)·φ(y),    φ(x) = e^(−|x|²/2)/√m · (e^(ω₁·x), …, e^(ω_m·x)),    ω ~ N(0, I)

because E e^(ω·(x + y)) = e^(|x + y|²/2). Choromanski et al. 2021, lemma 1 and eq. 5 (arXiv 2009.14794).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import Projected, Projection
from tarnn.feature_maps.draws import SoftmaxKernelMap
from tarnn.feature_maps.registry import register
from tarnn.numerics import full_precision, wide, widen


class Exponents(NamedTuple):
    """The exponents of features φ(x)_i = exp(ω_i·x + β_i + offset). `mirrored`: exp(−ω_i·x + β_i + offset) follow."""

    x: Float[Tensor, "*batch d"]
    offset: Float[Tensor, "*batch"]
    omega: Float[Tensor, "m d"]
    bias: Float[Tensor, "..."] | None = None  # (…, m)
    mirrored: bool = False

    def features(self) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        """Compute (features, log-scale): the largest exponent of each x is taken out, so its largest feature is 1.

        The scale is a constant under autograd. Computed in the precision of x, in autocast too.
        """
        with full_precision(self.x):
            u = self.x @ self.omega.to(self.x.dtype).mT  # (…, m)
        if self.mirrored:
            u = torch.cat([u, -u], dim=-1)
        if self.bias is not None:
            u = u + (torch.cat([self.bias, self.bias], dim=-1) if self.mirrored else self.bias)
        u = u + self.offset[..., None]
        scale = u.detach().amax(-1, keepdim=True)
        return (u - scale).exp(), scale.squeeze(-1)


class ExponentialMap(SoftmaxKernelMap):
    """The base class of maps whose features are exponentials of ω·x. A subclass may change `exponents`.

    `scaled` computes in float32, or float64 for float64 inputs: features whose largest is 1, and the log-scale. So no norm
    is too large: features of one x may differ by more than a float's range, and where all those that matter
    underflow together the estimate was worthless long before.
    """

    mirrored = False

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
        name, halves = type(self).__name__, 2 if self.mirrored else 1
        if num_features % halves:
            raise ValueError(f"{name} makes features in pairs: num_features must be even; got {num_features}.")
        super().__init__(head_dim, num_features // halves, scale=scale, directions=directions, norms=norms, seed=seed)

    def num_features(self, head_dim: int) -> int:
        return 2 * self.num_draws if self.mirrored else self.num_draws

    def exponents(self, x: Float[Tensor, "*batch d"]) -> Exponents:
        """The exponents of φ(x), in float32 at least."""
        self.check_width(x)
        x = widen(x) * self.scale**0.5
        offset = -0.5 * x.square().sum(-1) - 0.5 * math.log(self.num_features(self.head_dim))
        return Exponents(x, offset, self.omega, mirrored=self.mirrored)

    def projection(self, dtype: torch.dtype) -> Projection | None:
        """Return the map as numbers for kernels, which need no copy of x; None if it has no such form. Parameters are float32,
        or float64 if dtype is."""
        omega = self.omega.to(wide(dtype))
        omega = torch.cat([omega, -omega]) if self.mirrored else omega
        offset = -0.5 * math.log(self.num_features(self.head_dim))
        return Projection("exp", omega[None, None], None, self.scale**0.5, 0.5 * self.scale, offset)

    def projected(self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]) -> Projected | None:
        self.check_width(q)
        self.check_width(k)
        projection = self.projection(q.dtype)
        return None if projection is None else Projected(projection, q, k)

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        return self.exponents(x).features()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:.4g}"


@register("favor")
class PositiveRandomFeatures(ExponentialMap):
    """FAVOR+: φ(x) = e^(−|x|²/2)/√m · (e^(ω₁·x), …, e^(ω_m·x)), unbiased for softmax's kernel, always positive.

        E φ(x)·φ(y) = exp(x·y)        variance, m independent ω: (1/m) e^(|x+y|²) e^(2x·y) (1 − e^(−|x+y|²))

    with x, y already multiplied by √scale. Orthogonal ω (the default) lower it (theorem 2). It is small where
    x·y is very negative and grows with e^(|x+y|²): at head_dim 64 and m = 256, attention is off by about 5 %,
    31 % and 160 % where queries and keys have standard deviation ¼, ½ and 1. What helps: more features,
    `Reparametrized` (centring), `OptimalRandomFeatures`. docs/favor.md has figures.

    Arguments as `SoftmaxKernelMap` and `RandomFeatureMap`; `directions` and `norms` as `draw_omega`.
    Choromanski et al. 2021, eq. 5 and lemmas 1, 2 (arXiv 2009.14794); m = 256 is the paper's (appendix A.3).

    >>> phi = PositiveRandomFeatures(head_dim=64)
    >>> phi(torch.randn(2, 8, 100, 64)).shape
    torch.Size([2, 8, 100, 256])
    """


@register("hyperbolic")
class HyperbolicRandomFeatures(ExponentialMap):
    """hyp+: φ(x) = e^(−|x|²/2)/√(2m) · (e^(ω·x), …, e^(−ω·x), …): twice as many features as draws.

    Unbiased and positive, with (1 − e^(−|x+y|²))/2 times the variance of `PositiveRandomFeatures` at as many
    draws. Choromanski et al. 2021, eq. 5 and lemmas 1, 2 (arXiv 2009.14794).
    """

    mirrored = True


@register("smreg")
class RegularizedRandomFeatures(ExponentialMap):
    """SMREG: positive features with ω on the sphere of radius √d instead of N(0, I).

    Estimates another kernel on purpose, a little below softmax's: 1 − 2/d^(1/3) + o(…) ≤ SMREG/SM ≤ 1
    (theorem 1); directions of one length give it less variance. Converges faster in the paper's figure 5.
    Choromanski et al. 2021, eq. 6–8 (arXiv 2009.14794).
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        scale: float | None = None,
        directions: str = "orthogonal",
        seed: int | None = None,
    ):
        super().__init__(head_dim, num_features, scale=scale, directions=directions, norms="fixed", seed=seed)
