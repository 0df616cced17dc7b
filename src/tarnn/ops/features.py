"""Features of queries and keys as the ops take them: by the kernels' own maps where they know them, else by the module."""

from typing import NamedTuple

from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import map_for
from tarnn.kernels import features as kernel_features
from tarnn.numerics import wide


def map_of(given: FeatureMap | nn.Module | str, q: Tensor, normalize: bool) -> FeatureMap:
    """The map that a caller means. Raises ValueError for one known to be signed where its sum would normalise."""
    feature_map = map_for(given, q)
    if normalize:
        feature_map.check_positive()
    return feature_map


class Inputs(NamedTuple):
    """What the kernels are given: q and k, the function that makes features of them or of their projection, weights."""

    q: Tensor
    k: Tensor
    function: str
    num_features: int
    query_log_weight: Tensor | None = (
        None  # (b, h, t): φ(q) is what the kernels make, times e^this; cancels in a mean
    )
    key_log_weight: Tensor | None = None  # (b, g, s)
    omega: Tensor | None = None  # (1 or b, 1 or g, f, d)
    bias: Tensor | None = None
    numbers: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)  # factor, square, offset, shift

    @property
    def log_scaled(self) -> bool:
        """Whether keys have log-weights of their own: the state then has a maximum."""
        return self.function == "exp" or self.key_log_weight is not None


def inputs(feature_map: FeatureMap, q: Tensor, k: Tensor) -> Inputs:
    """Attention with a map as the kernels do it: by a function that they know, by a projection and such a function,
    or, with any other module, from its features.

    Raises ValueError if a map has parameters for another number of heads or rows, or doesn't keep leading axes.
    """
    if name := feature_map.kernel:
        return Inputs(q, k, name, k.shape[3])
    found = feature_map.projected(q, k)
    if found is None:
        (q, q_scale), (k, k_scale) = features(feature_map, q, "queries"), features(feature_map, k, "keys")
        return Inputs(q, k, "identity", k.shape[3], q_scale, k_scale)
    of = found.projection
    return Inputs(
        found.q, found.k, of.function, of.omega.shape[2], found.query_log_weight, found.key_log_weight,
        _for_heads(of.omega, k), None if of.bias is None else _for_heads(of.bias, k),
        (of.factor, of.square, of.offset, of.shift),
    )  # fmt: skip


def _for_heads(x: Tensor, k: Tensor) -> Tensor:
    """A parameter of a map's heads, one for all or one for each of k's."""
    (b, g), (rows, heads) = k.shape[:2], x.shape[:2]
    if g % heads or rows not in (1, b):
        raise ValueError(
            f"a map with parameters for {rows} rows and {heads} heads needs as many rows and a multiple of its heads; "
            f"got k {tuple(k.shape)}."
        )
    return x if heads in (1, g) else x.repeat_interleave(g // heads, dim=1)


def features(feature_map: FeatureMap, x: Tensor, side: str) -> tuple[Tensor, Tensor | None]:
    """φ(x) and its log-scale (or None), for x (b, h, t, d), the "queries" or "keys"; by the kernels' maps in
    float32 at least.

    Raises ValueError if the module does not keep the leading axes.
    """
    if name := feature_map.kernel:
        return kernel_features.features(name, x.to(wide(x.dtype)))
    phi, scale = feature_map.queries(x) if side == "queries" else feature_map.keys(x)
    if phi.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"a feature map takes (…, d) to (…, f), one token at a time; {feature_map._get_name()} took "
            f"{tuple(x.shape)} to {tuple(phi.shape)}."
        )
    return phi, scale
