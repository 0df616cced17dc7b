"""Means and covariances of queries and keys per head, and maps whose parameters are computed from them.

Softmax's kernel can be estimated in many ways that are all exact in expectation and differ, by orders of
magnitude, in variance. The best of them depends on the data, and the maps in `optimal.py` and
`reparametrized.py` find it from means and covariances alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.numerics import widen

FITS = ("calibrated", "call")


class Spread(NamedTuple):
    """The number, mean and variance of the vectors of each head, in `u` groups: 1, or one per packed sequence."""

    number: Float[Tensor, "*b g u 1"]
    mean: Float[Tensor, "*b g u d"]
    variance: Float[Tensor, "*b g u d"]
    covariance: Float[Tensor, "*b g u d d"] | None = None

    @property
    def square(self) -> Float[Tensor, "*b g u d"]:
        """The mean of the squares, channel by channel."""
        return self.variance + self.mean.square()

    def moved(self, centre: Tensor, factor: Tensor) -> "Spread":
        """The spread of (x − centre) · factor."""
        covariance = self.covariance
        if covariance is not None:
            covariance = covariance * factor[..., :, None] * factor[..., None, :]
        return Spread(self.number, (self.mean - centre) * factor, self.variance * factor.square(), covariance)

    def merged(self, other: "Spread") -> "Spread":
        """The spread of both together (Chan, Golub and LeVeque 1983)."""
        number = self.number + other.number
        share = other.number / number.clamp(min=1)
        step = other.mean - self.mean
        between = share * (1 - share) * step.square()
        variance = self.variance + share * (other.variance - self.variance) + between
        covariance = None
        if self.covariance is not None and other.covariance is not None:
            outer = (share * (1 - share))[..., None] * step[..., :, None] * step[..., None, :]
            covariance = self.covariance + share[..., None] * (other.covariance - self.covariance) + outer
        return Spread(number, self.mean + share * step, variance, covariance)

    def over_batch(self) -> "Spread":
        """Merge (b, g, u, …) over b and u: one spread per head, (g, 1, …)."""
        parts = self.each(lambda x: x.transpose(1, 2).flatten(0, 1))  # (b·u, g, …)
        total = parts.row(0)
        for i in range(1, parts.number.shape[0]):
            total = total.merged(parts.row(i))
        return total

    def row(self, i: int) -> "Spread":
        return self.each(lambda x: x[i][:, None])

    def each(self, f: Callable[[Tensor], Tensor]) -> "Spread":
        covariance = None if self.covariance is None else f(self.covariance)
        return Spread(f(self.number), f(self.mean), f(self.variance), covariance)


@torch.no_grad()
def spread_of(
    x: Float[Tensor, "b h t d"],
    num_heads: int,
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    full: bool = False,
) -> Spread:
    """Compute the spread of x for each of `num_heads` groups of its heads: in float32 at least, in two passes, O(t·d).

    mask: True = counts. cu_seqlens: each packed sequence by itself, u = n; full: the covariance too, O(t·d²).
    """
    b, _, t, _ = x.shape
    x = widen(x).unflatten(1, (num_heads, -1))  # (b, g, r, t, d)
    weight = x.new_ones(b, 1, 1, t, 1) if mask is None else mask[:, None, None, :, None].to(x.dtype)
    if mask is not None:
        x = x.masked_fill(~mask[:, None, None, :, None], 0.0)  # whatever stands there: NaN too
    weight = weight.expand(*x.shape[:-1], 1)
    if cu_seqlens is None:
        index, groups = x.new_zeros(t, dtype=torch.long), 1
    else:
        index, groups = sequence_of(cu_seqlens, t), cu_seqlens.shape[0] - 1

    def total(y: Tensor) -> Tensor:  # (b, g, r, t, …) → (b, g, u, …)
        y = y.sum(2)
        if cu_seqlens is None:
            return y.sum(2, keepdim=True)
        return y.new_zeros(*y.shape[:2], groups, *y.shape[3:]).index_add_(2, index, y)

    count = total(weight)
    mean = total(x) / count.clamp(min=1)
    centred = (x - mean[:, :, index][:, :, None]) * weight
    variance = total(centred.square()) / count.clamp(min=1)
    covariance = None
    if full:
        if cu_seqlens is not None:
            raise ValueError(
                "covariances of packed sequences are not kept: take a map with a number per channel "
                "(Reparametrized, OptimalRandomFeatures) or pad instead of packing."
            )
        flat = centred.flatten(2, 3)  # (b, g, r·t, d)
        covariance = ((flat.mT @ flat) / count.clamp(min=1))[:, :, None]
    return Spread(count, mean, variance, covariance)


def sequence_of(cu_seqlens: Int[Tensor, " n_plus_1"], num_tokens: int) -> Int[Tensor, " t"]:
    """The index of the packed sequence that each token belongs to."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return (torch.searchsorted(cu_seqlens.long(), tokens, right=True) - 1).clamp(max=cu_seqlens.shape[0] - 2)


def per_head(parameter: Float[Tensor, "*b g u k"], x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Repeat a parameter of g key/value heads for x (…, h, t, d): (…, h, u, k), or (k,) if g = u = 1.

    u is 1 or t. Raises ValueError where x has no multiple of g heads.
    """
    g = parameter.shape[-3]
    if g == 1 and parameter.ndim == 3 and parameter.shape[1] == 1:
        return parameter[0, 0]  # the same for all: x may have any axes
    if x.ndim < 3 or x.shape[-3] % g:
        raise ValueError(f"a map with {g} heads needs (…, {g}·r, t, d), r ≥ 1; got {tuple(x.shape)}.")
    return parameter if g == 1 else parameter.repeat_interleave(x.shape[-3] // g, dim=-3)


class FittedMap(FeatureMap):
    """A map with parameters per head that are computed from data: any values are exact, the best have least variance.

    fit = "calibrated": they are buffers, saved with the model, neutral until `calibrate` sets them: for causal
        attention, where the data of a call would include the future; `tarnn.attention.calibrating` does it for
        a model's layers.
    fit = "call": for attention to both sides, each call finds its own: `LinearAttention` does it by itself; with
        the function write `linear_attention(q, k, v, phi.fitted(q, k), causal=False)`.
    Either way they are constants under autograd.
    """

    fit: str = "calibrated"
    num_heads: int = 1
    adapts: bool = True
    """False where all parameters were given."""
    full_spread: bool = False
    """Its parameters need covariances."""

    def parameters_for(self, q: Spread, k: Spread) -> dict[str, Tensor]:
        """The best parameters, (…, g, u, ·), by the name of their buffers."""
        raise NotImplementedError

    def fitted_to(self, q: Spread, k: Spread, index: Tensor | None = None) -> "FittedMap":
        """Make a copy with the parameters for these spreads. index: the group u of each token, if packed."""
        return self.with_buffers(_tokens(self.parameters_for(q, k), index))

    def calibrate(self, q: Spread, k: Spread) -> None:
        """Set the buffers to the parameters for these spreads, (g, 1, ·) each."""
        for name, value in self.parameters_for(q, k).items():
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def fitted(
        self,
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        *,
        query_mask: Bool[Tensor, "b t"] | None = None,
        key_mask: Bool[Tensor, "b s"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    ) -> "FittedMap":
        """Make a copy of this map with the best parameters for these queries and keys, row by row and head by head.

        Masked ones don't count; packed sequences are fitted one by one. The result is for this call only.
        """
        if not self.adapts:
            return self
        for_q, for_k = (
            spread_of(x, k.shape[1], mask=mask, cu_seqlens=cu_seqlens, full=self.full_spread)
            for x, mask in ((q, query_mask), (k, key_mask))
        )
        index = None if cu_seqlens is None else sequence_of(cu_seqlens, q.shape[2])
        return self.fitted_to(for_q, for_k, index)

    def with_buffers(self, values: dict[str, Tensor]) -> "FittedMap":
        """Make a copy that shares everything but these buffers."""
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone.__dict__["_buffers"] = {**self._buffers, **values}
        return clone

    def set_fit(self, fit: str, num_heads: int) -> None:
        if fit not in FITS:
            raise ValueError(f"{type(self).__name__} takes fit = {', '.join(FITS)}; got {fit!r}.")
        if num_heads < 1:
            raise ValueError(f"{type(self).__name__} needs num_heads ≥ 1; got {num_heads}.")
        self.fit, self.num_heads = fit, num_heads


def _tokens(parameters: dict[str, Tensor], index: Tensor | None) -> dict[str, Tensor]:
    if index is None:
        return parameters
    return {name: x.index_select(-2, index) for name, x in parameters.items()}
