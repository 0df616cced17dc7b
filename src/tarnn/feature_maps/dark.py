"""Data-aware random features: directions drawn from a Gaussian that fits queries and keys, weighted so that nothing is biased.

For any covariance Σ, with p the density of N(0, I) and p_Σ that of N(0, Σ),

    exp(x·y) = E φ(x)·φ(y),   φ(x)_i = √(p(ω_i)/p_Σ(ω_i))/√m · exp(ω_i·x − |x|²/2),   ω_i ~ N(0, Σ)

and Σ = I is FAVOR+. Over queries q ~ N(0, Λ_q) and keys k ~ N(0, Λ_k) the mean variance is least for

    Σ⁻¹ = I − 2Λ_q(I + 2Λ_q)⁻¹ − 2Λ_k(I + 2Λ_k)⁻¹

if that is positive; for Λ_q = Λ_k = Λ it is Σ = (I + 2Λ)(I − 2Λ)⁻¹ (Farzam et al. 2026, arXiv 2603.04127, theorem 3.2).
"""

import torch
from torch import Tensor

from tarnn.feature_maps.optimal import SderfFeatures
from tarnn.feature_maps.registry import register
from tarnn.feature_maps.statistics import Spread


@register("dark")
class DataAwareRandomFeatures(SderfFeatures):
    """Positive features whose ω are drawn from the covariance that suits the data, with the weight of that choice.

    With Σ = U σ² Uᵀ and ω = U(σ ⊙ z), z ~ N(0, I), these are SDERF's features with 1 − 4a = σ²: the two differ in the numbers
    alone. SDERF lowers the logarithm of the variance for any data; this lowers the variance itself, for data that are
    Gaussian around zero. Where queries and keys are so large that the best Σ does not exist (Λ ≥ ½ in some direction), the
    eigenvalues of Σ⁻¹ stop at `least`: still unbiased, no longer the best.

    DARKFormer itself also learns a matrix M and estimates exp(Mx·My). A model needs no map for that: M is one with the
    projections that make queries and keys.

    least: in (0, 1]; 1 is FAVOR+. Other arguments as `SderfFeatures`. Calibrated, it starts as FAVOR+.
    Farzam et al. 2026 (arXiv 2603.04127).
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        num_heads: int = 1,
        least: float = 0.1,
        fit: str = "calibrated",
        scale: float | None = None,
        directions: str = "orthogonal",
        seed: int | None = None,
    ):
        if not 0 < least <= 1:
            raise ValueError(f"DataAwareRandomFeatures needs 0 < least ≤ 1; got {least}.")
        super().__init__(
            head_dim, num_features, num_heads=num_heads, fit=fit, scale=scale, directions=directions, seed=seed
        )
        self.least = least

    def parameters_for(self, q: Spread, k: Spread) -> dict[str, Tensor]:
        precision = torch.eye(self.head_dim, dtype=q.mean.dtype, device=q.mean.device)
        for spread in (q, k):
            assert spread.covariance is not None
            moment = self.scale * (spread.covariance + spread.mean[..., :, None] * spread.mean[..., None, :])
            values, vectors = torch.linalg.eigh(moment.squeeze(-3))  # (…, g, d), (…, g, d, d)
            values = values.clamp(min=0)
            precision = precision - (vectors * (2 * values / (1 + 2 * values))[..., None, :]) @ vectors.mT
        values, U = torch.linalg.eigh(precision)
        return {"a": ((1 - 1 / values.clamp(min=self.least)) / 4)[..., None, :], "U": U}
