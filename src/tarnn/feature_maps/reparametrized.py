"""Centring and balancing: move queries and keys so that their products stay and random features err less.

    exp(q·k) = exp((q − c_q)·(k − c_k)) · exp(c_q·(k − c_k)) · exp(q·c_k)
    q·k      = (a ⊙ q)·(k/a)

The second factor is a weight per key, the third a weight per query, which softmax divides out. Both identities are
exact for every c_q, c_k, a; the error of positive features grows with e^(|q + k|²), which is least for the means
and for a_l = (mean k_l²/mean q_l²)^(1/4).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap, Projected
from tarnn.feature_maps.draws import SoftmaxKernelMap
from tarnn.feature_maps.statistics import FittedMap, Spread, per_head
from tarnn.numerics import widen

SMALL = 1e-6  # of the mean square: keeps a channel that is always zero from being blown up


class Reparametrized(FittedMap):
    """A map of softmax's kernel, fed with queries and keys that are centred and balanced: O(t·d), exact.

    `feature_map`: positive, hyperbolic, optimal … features. Around `OptimalRandomFeatures` without centring it
    is "SADERF" of FAVOR# (Likhosherstov et al. 2023, arXiv 2302.00787), whose Ψ is our balance.
    centre, balance: which of the two. fit: where c_q, c_k and a come from, see `FittedMap`; calibrated, they
    start at 0, 0 and 1. num_heads: key/value heads, each with its own; the query heads that share a key head
    share them too.

    What is moved is shared by query and key, so queries and keys go through `queries` and `keys`, as the op
    does it; `forward`, for one x, has no meaning here.

    Raises ValueError for a map of another kernel (centring is not exact there), or one fitted in another way.
    """

    log_scaled = True
    dot_product = True
    query_centre: Tensor
    key_centre: Tensor
    stretch: Tensor

    def __init__(
        self,
        feature_map: SoftmaxKernelMap,
        *,
        num_heads: int = 1,
        centre: bool = True,
        balance: bool = True,
        fit: str = "calibrated",
    ):
        super().__init__()
        if not isinstance(feature_map, SoftmaxKernelMap):
            raise ValueError(
                "Reparametrized takes a map of softmax's kernel, such as PositiveRandomFeatures; got "
                f"{type(feature_map).__name__}."
            )
        self.set_fit(fit, num_heads)
        if isinstance(feature_map, FittedMap) and feature_map.adapts:
            mine, its = (fit, num_heads), (feature_map.fit, feature_map.num_heads)
            if mine != its:
                raise ValueError(
                    "Reparametrized and the map in it are fitted alike, the same fit and num_heads; got "
                    f"{mine} and {its}."
                )
        self.feature_map, self.centre, self.balance = feature_map, centre, balance
        self.positive = feature_map.positive
        self.full_spread = isinstance(feature_map, FittedMap) and feature_map.full_spread
        for name, value in self.initial_buffers().items():
            self.register_buffer(name, value)

    @property
    def inner(self) -> FeatureMap:
        return self.feature_map

    def initial_buffers(self) -> dict[str, Tensor]:
        zeros = torch.zeros(self.num_heads, 1, self.feature_map.head_dim)
        return {"query_centre": zeros, "key_centre": zeros.clone(), "stretch": torch.ones_like(zeros)}

    def num_features(self, head_dim: int) -> int:
        return self.feature_map.num_features(head_dim)

    def parameters_for(self, q: Spread, k: Spread) -> dict[str, Tensor]:
        zeros = torch.zeros_like(q.mean)
        centres = {"query_centre": q.mean if self.centre else zeros, "key_centre": k.mean if self.centre else zeros}
        if not self.balance:
            return {**centres, "stretch": torch.ones_like(zeros)}
        squares = [x.variance if self.centre else x.square for x in (k, q)]
        above, below = (x + SMALL * x.mean(-1, keepdim=True) + 1e-30 for x in squares)
        return {**centres, "stretch": (above / below) ** 0.25}

    def fitted_to(self, q: Spread, k: Spread, index: Tensor | None = None) -> "FittedMap":
        clone = super().fitted_to(q, k, index)
        if isinstance(self.feature_map, FittedMap) and self.feature_map.adapts:
            inner = self.feature_map.fitted_to(*self._moved(q, k), index)
            clone.__dict__["_modules"] = {**self._modules, "feature_map": inner}
        return clone

    def calibrate(self, q: Spread, k: Spread) -> None:
        super().calibrate(q, k)
        if isinstance(self.feature_map, FittedMap) and self.feature_map.adapts:
            self.feature_map.calibrate(*self._moved(q, k))

    def _moved(self, q: Spread, k: Spread) -> tuple[Spread, Spread]:
        values = self.parameters_for(q, k)
        stretch = values["stretch"]
        return q.moved(values["query_centre"], stretch), k.moved(values["key_centre"], 1 / stretch)

    def moved_queries(self, q: Float[Tensor, "*batch d"]) -> tuple[Tensor, Tensor]:
        """Compute a ⊙ (q − c_q) and the log-weight scale·q·c_k: (…, t, d) and (…, t), in float32 at least."""
        self.feature_map.check_width(q)
        q = widen(q)
        centre, other, stretch = self._values(q)
        return (q - centre) * stretch, self.feature_map.scale * (q * other).sum(-1)

    def moved_keys(self, k: Float[Tensor, "*batch d"]) -> tuple[Tensor, Tensor]:
        """Compute (k − c_k)/a and the log-weight scale·c_q·(k − c_k)."""
        self.feature_map.check_width(k)
        k = widen(k)
        other, centre, stretch = self._values(k)
        k = k - centre
        return k / stretch, self.feature_map.scale * (k * other).sum(-1)

    def projected(self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]) -> Projected | None:
        """The projection of moved queries and keys, which are copies of q and k; features are still not stored."""
        (moved_q, query_log_weight), (moved_k, key_log_weight) = self.moved_queries(q), self.moved_keys(k)
        projected = self.feature_map.projected(moved_q, moved_k)
        if projected is None:
            return None
        return projected._replace(query_log_weight=query_log_weight, key_log_weight=key_log_weight)

    def queries(self, q: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        moved, log_weight = self.moved_queries(q)
        return _weighted(*self.feature_map.queries(moved), log_weight)

    def keys(self, k: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        moved, log_weight = self.moved_keys(k)
        return _weighted(*self.feature_map.keys(moved), log_weight)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("Reparametrized moves queries and keys in different ways: take .queries(q) and .keys(k).")

    def _values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = (self.query_centre, self.key_centre, self.stretch)
        centre, other, stretch = (per_head(value, x).to(x.dtype) for value in values)
        return centre, other, stretch

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, centre={self.centre}, balance={self.balance}, fit={self.fit}"


def _weighted(features: Tensor, scale: Tensor | None, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply φ(x) by e^log_weight: its value goes to the log-scale, its gradient flows through the features."""
    constant = log_weight.detach()
    weighted = features * (log_weight - constant).exp()[..., None]
    return weighted, constant if scale is None else scale + constant
