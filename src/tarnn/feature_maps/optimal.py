"""Positive features with the least variance for the data: FAVOR++ (OPRF), and SDERF, its anisotropic form.

For any A < 1/8 and ω ~ N(0, I)

    exp(x·y) = E φ(x)·φ(y),   φ(x)_i = (1 − 4A)^(d/4)/√m · exp(A|ω_i|² + √(1 − 4A) ω_i·x − |x|²/2)

and A = 0 is FAVOR+. Averaged over queries q and keys k the logarithm of the variance is least at

    A = (1 − 2λ − √((2λ + 1)² + 8λ))/16,        λ = mean |q_i + k_j|²/d ≥ 0

(Likhosherstov et al. 2022, arXiv 2205.15317). A ≤ 0, so the features are bounded.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import Projection
from tarnn.feature_maps.exponential import ExponentialMap, Exponents
from tarnn.feature_maps.registry import register
from tarnn.feature_maps.statistics import FittedMap, Spread, per_head
from tarnn.numerics import full_precision


def optimal_a(spread: Tensor) -> Tensor:
    """The optimal A for λ ≥ 0, elementwise, as −λ/(1 − 2λ + √((2λ + 1)² + 8λ)), which loses no digits near λ = 0."""
    return -spread / (1 - 2 * spread + ((2 * spread + 1).square() + 8 * spread).sqrt())


@register("oprf")
@register("saderf", balance=True)
class OptimalRandomFeatures(FittedMap, ExponentialMap):
    """FAVOR++: positive features with the A that is optimal for the data, one per head, or a given one.

    In expectation the estimate is that of `PositiveRandomFeatures`; the larger queries and keys are, the smaller
    is its error compared with theirs. λ comes from means and variances alone, in O(t·d):
    mean |q_i + k_j|² = mean |q_i|² + mean |k_j|² + 2 mean(q)·mean(k).

    A: given, below 1/8; None: from the data, as `fit` says (see `FittedMap`); calibrated, it starts at 0.
    num_heads: key/value heads, each with its A. Other arguments as `PositiveRandomFeatures`.
    Likhosherstov et al. 2022, "Chefs' Random Tables" (arXiv 2205.15317).
    """

    A: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        num_heads: int = 1,
        A: float | None = None,
        fit: str = "calibrated",
        scale: float | None = None,
        directions: str = "orthogonal",
        seed: int | None = None,
    ):
        super().__init__(head_dim, num_features, scale=scale, directions=directions, seed=seed)
        self.set_fit(fit, num_heads)
        if A is not None and not A < 0.125:
            raise ValueError(f"OptimalRandomFeatures needs A < 1/8, or its variance is infinite; got {A}.")
        self.adapts, self.first_A = A is None, A or 0.0
        self.register_buffer("A", torch.full((num_heads, 1, 1), self.first_A))

    def initial_buffers(self) -> dict[str, Tensor]:
        return super().initial_buffers() | {"A": torch.full_like(self.A, self.first_A)}

    def parameters_for(self, q: Spread, k: Spread) -> dict[str, Tensor]:
        mean = (q.square + k.square + 2 * q.mean * k.mean).mean(-1, keepdim=True)
        return {"A": optimal_a(self.scale * mean)}

    def exponents(self, x: Float[Tensor, "*batch d"]) -> Exponents:
        plain = super().exponents(x)
        a = per_head(self.A, x).to(plain.x.dtype)  # (…, h, 1 or t, 1), or (1,)
        stretch = 1 - 4 * a
        offset = plain.offset + (self.head_dim / 4) * stretch.log().squeeze(-1)
        bias = a * self.omega.to(plain.x.dtype).square().sum(-1)  # (…, m)
        return plain._replace(x=plain.x * stretch.sqrt(), offset=offset, bias=bias)

    def projection(self, dtype: torch.dtype) -> Projection | None:
        if self.A.shape[-2] > 1:  # one for each token, where packed sequences were fitted one by one
            return None
        plain = super().projection(dtype)
        assert plain is not None
        assert plain.omega is not None
        a = self.A.to(plain.omega.dtype).view(-1, *self.A.shape[-3:])  # (#b, #g, 1, 1)
        stretch = 1 - 4 * a
        bias = a.squeeze(-1) * plain.omega.square().sum(-1) + (self.head_dim / 4) * stretch.log().squeeze(-1)
        return plain._replace(omega=plain.omega * stretch.sqrt(), bias=bias)

    def extra_repr(self) -> str:
        source = f"fit={self.fit}" if self.adapts else f"A={self.first_A:g}"
        return f"{super().extra_repr()}, num_heads={self.num_heads}, {source}"


@register("sderf")
class SderfFeatures(FittedMap, ExponentialMap):
    """SDERF: FAVOR++ with an a for each direction in which queries and keys spread, not one for all.

        φ(x)_i = Π_l (1 − 4a_l)^(1/4)/√m · exp(Σ_l a_l ω_il² + ω_i·(1 − 4a)^(1/2) Uᵀx − |x|²/2)

    with U Λ Uᵀ the eigenvectors and values of M_q + M_k + μ_q μ_kᵀ + μ_k μ_qᵀ (M second moments, μ means), and
    a_l the optimal A for λ_l. Takes a covariance and a (d × d) eigendecomposition per head, O(t·d² + d³): where
    that is too much, `Reparametrized(OptimalRandomFeatures(…))` ("SADERF") does nearly as well.

    Arguments as `OptimalRandomFeatures`. Calibrated, it starts as FAVOR+. Packed sequences can't be fitted by
    the call. Likhosherstov et al. 2023, "FAVOR#" (arXiv 2302.00787).
    """

    full_spread = True
    a: Tensor
    U: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        num_heads: int = 1,
        fit: str = "calibrated",
        scale: float | None = None,
        directions: str = "orthogonal",
        seed: int | None = None,
    ):
        super().__init__(head_dim, num_features, scale=scale, directions=directions, seed=seed)
        self.set_fit(fit, num_heads)
        self.register_buffer("a", torch.zeros(num_heads, 1, head_dim))
        self.register_buffer("U", torch.eye(head_dim).repeat(num_heads, 1, 1))

    def initial_buffers(self) -> dict[str, Tensor]:
        eye = torch.eye(self.head_dim, device="cpu").repeat(self.num_heads, 1, 1)
        return super().initial_buffers() | {"a": torch.zeros_like(self.a), "U": eye}

    def parameters_for(self, q: Spread, k: Spread) -> dict[str, Tensor]:
        assert q.covariance is not None
        assert k.covariance is not None
        mean = q.mean + k.mean
        # M_q + M_k + μ_q μ_kᵀ + μ_k μ_qᵀ = cov_q + cov_k + (μ_q + μ_k)(μ_q + μ_k)ᵀ
        matrix = q.covariance + k.covariance + mean[..., :, None] * mean[..., None, :]
        spread, U = torch.linalg.eigh(self.scale * matrix.squeeze(-3))  # (…, g, d), (…, g, d, d)
        return {"a": optimal_a(spread.clamp(min=0))[..., None, :], "U": U}

    def exponents(self, x: Float[Tensor, "*batch d"]) -> Exponents:
        plain = super().exponents(x)
        dtype = plain.x.dtype
        a, U = per_head(self.a, x).to(dtype), self._turn(x).to(dtype)
        stretch = 1 - 4 * a
        with full_precision(x):
            turned = plain.x @ U
            bias = a @ self.omega.to(dtype).square().mT
        offset = plain.offset + 0.25 * stretch.log().sum(-1)
        return plain._replace(x=turned * stretch.sqrt(), offset=offset, bias=bias)

    def projection(self, dtype: torch.dtype) -> Projection | None:
        plain = super().projection(dtype)
        assert plain is not None
        assert plain.omega is not None
        # (#b, #g, 1 or d, d)
        a, U = (x.to(plain.omega.dtype).view(-1, *x.shape[-3:]) for x in (self.a, self.U))
        stretch = 1 - 4 * a
        with full_precision(a):
            turned = (plain.omega * stretch.sqrt()) @ U.mT
            bias = (a @ plain.omega.square().mT).squeeze(-2) + 0.25 * stretch.log().sum(-1)
        return plain._replace(omega=turned, bias=bias)

    def _turn(self, x: Tensor) -> Tensor:
        """U as (d, d), or (…, h, d, d)."""
        if self.U.shape[-3] == 1:
            return self.U[0] if self.U.ndim == 3 else self.U
        return self.U.repeat_interleave(x.shape[-3] // self.U.shape[-3], dim=-3)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_heads={self.num_heads}, fit={self.fit}"
