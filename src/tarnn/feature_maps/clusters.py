"""Features from clusters of queries: an estimate of a trained softmax model's attention to distant keys."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register
from tarnn.feature_maps.statistics import per_head
from tarnn.numerics import widen

ROUNDS = 8  # of k-means


@register("clusters")
class QueryClusters(FeatureMap):
    """φ(q)_i = softmax_i(β·scale·(q·c_i − |c_i|²/2)), φ(k)_i = exp(scale·c_i·k): a query attends as the centres near it do.

    Each feature is one centre's softmax attention, exactly; a query takes those of the centres that it is near to. Nothing
    is random: where the queries of a head lie in clusters, few features do, and one feature is the attention of the mean
    query. Unlike random features it has a bias, and a small variance. Centres c (m, d) and the sharpness β are parameters,
    per key/value head; `cluster` sets the centres to those of given queries, and until then they are normal draws.

    Attention of cluster centres: Vyas, Katharopoulos and Fleuret 2020 (arXiv 2007.04825), there with each query's own
    cluster alone (β = ∞) and without a sum to keep.
    """

    log_scaled = True
    log_features = True  # a centre peaks at the keys in its own direction
    scale: float

    def __init__(
        self,
        head_dim: int,
        num_features: int = 64,
        *,
        num_heads: int = 1,
        sharpness: float = 3.0,
        scale: float | None = None,
        seed: int | None = None,
    ):
        if num_features < 1:
            raise ValueError(f"QueryClusters needs num_features of 1 or more; got {num_features}.")
        super().__init__()
        self.head_dim, self.first_sharpness, self.seed = head_dim, sharpness, seed
        self.scale = head_dim**-0.5 if scale is None else scale
        self.centres = nn.Parameter(torch.empty(num_heads, num_features, head_dim))
        self.sharpness = nn.Parameter(torch.empty(num_heads, 1, 1))
        with torch.no_grad():
            for name, value in self.initial_buffers().items():
                getattr(self, name).copy_(value)

    def initial_buffers(self) -> dict[str, Tensor]:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        centres = torch.randn(self.centres.shape, generator=generator, device="cpu")
        return {"centres": centres, "sharpness": torch.full(self.sharpness.shape, self.first_sharpness)}

    def num_features(self, head_dim: int) -> int:
        return self.centres.shape[1]

    @torch.no_grad()
    def cluster(self, q: Float[Tensor, "g n d"]) -> None:
        """Set the centres of each head to those of its n ≥ m queries, by k-means."""
        m = self.centres.shape[1]
        if q.shape[1] < m:
            raise ValueError(f"{m} clusters need as many queries or more; got {q.shape[1]}.")
        order = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(self.seed or 0))
        c = widen(q[:, order[:m].to(q.device)]).clone()
        for _ in range(ROUNDS):
            nearest = torch.cdist(widen(q), c).argmin(-1)  # (g, n)
            member = nn.functional.one_hot(nearest, m).to(c.dtype)  # (g, n, m)
            count = member.sum(1)[..., None]
            c = torch.where(count > 0, member.mT @ widen(q) / count.clamp(min=1), c)
        self.centres.copy_(c)

    def log_queries(self, q: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        q = widen(q)
        c, beta = self._centres(q), per_head(self.sharpness, q).to(q.dtype)
        near = self.scale * beta * (q @ c.mT - 0.5 * c.square().sum(-1)[..., None, :])
        return near.log_softmax(-1)

    def log_keys(self, k: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        k = widen(k)
        return self.scale * k @ self._centres(k).mT

    def queries(self, q: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        exponents = self.log_queries(q)
        return exponents.exp(), torch.zeros_like(exponents[..., 0])

    def keys(self, k: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch f"], Float[Tensor, "*batch"]]:
        exponents = self.log_keys(k)
        log_scale = exponents.detach().amax(-1)
        return (exponents - log_scale[..., None]).exp(), log_scale

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("QueryClusters treats queries and keys in different ways: take .queries(q) and .keys(k).")

    def _centres(self, x: Tensor) -> Tensor:
        """The centres c for x (…, h, t, d), in its dtype: (m, d) or (h, m, d)."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"these QueryClusters were made for head_dim = {self.head_dim}; got {tuple(x.shape)}.")
        g, centres = self.centres.shape[0], self.centres.to(x.dtype)
        if g == 1:
            return centres[0]
        if x.ndim < 3 or x.shape[-3] % g:
            raise ValueError(f"QueryClusters with {g} heads need (…, {g}·r, t, d); got {tuple(x.shape)}.")
        return centres.repeat_interleave(x.shape[-3] // g, dim=-3)

    def extra_repr(self) -> str:
        g, m, d = self.centres.shape
        return f"head_dim={d}, num_heads={g}, num_features={m}"
