"""Features of queries and keys as the ops take them: by the kernels' own maps where they know them, else by the module."""

from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.by_name import map_for
from tarnn.kernels import features as kernel_features
from tarnn.numerics import wide, widen

Features = tuple[Tensor, Tensor | None]


def map_of(given: FeatureMap | nn.Module | str, q: Tensor, normalize: bool) -> FeatureMap:
    """The map that a caller means. Raises ValueError for one known to be signed where its sum would normalise."""
    feature_map = map_for(given, q)
    if normalize:
        feature_map.check_positive()
    return feature_map


def features(feature_map: FeatureMap, x: Tensor, side: str) -> Features:
    """φ(x) and its log-scale (or None), for x (b, h, t, d), the "queries" or "keys"; by the kernels' maps in
    float32 at least.

    Raises ValueError if the module does not keep the leading axes, TypeError if float64 comes of other numbers or the reverse.
    """
    if name := feature_map.kernel:
        return kernel_features.features(name, widen(x))
    phi, scale = feature_map.queries(x) if side == "queries" else feature_map.keys(x)
    _check_made(feature_map, x, phi)
    return phi, scale


def log_features(feature_map: FeatureMap, x: Tensor, side: str) -> Tensor:
    """log φ(x) (b, h, t, f) of a map that has `log_features`; errors as of `features`."""
    found = feature_map.log_queries(x) if side == "queries" else feature_map.log_keys(x)
    _check_made(feature_map, x, found)
    return found


def raw_features(feature_map: FeatureMap, x: Tensor, side: str) -> Features:
    """`features`, or `log_features` and None."""
    if feature_map.log_features:
        return log_features(feature_map, x, side), None
    return features(feature_map, x, side)


def _check_made(feature_map: FeatureMap, x: Tensor, phi: Tensor) -> None:
    if phi.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"a feature map takes (…, d) to (…, f), one token at a time; {feature_map._get_name()} took "
            f"{tuple(x.shape)} to {tuple(phi.shape)}."
        )
    # kernels compute all of a call in one type
    if not phi.is_floating_point() or wide(phi.dtype) != wide(x.dtype):
        raise TypeError(
            f"a feature map must keep to the precision of its input; {feature_map._get_name()} made {phi.dtype} of {x.dtype}."
        )


def check_widths(phi_q: Tensor, phi_k: Tensor) -> None:
    """Raise ValueError unless queries and keys have as many features: kernels read both by the width of one."""
    if phi_q.shape[-1] != phi_k.shape[-1]:
        raise ValueError(
            f"a feature map must give queries and keys as many features; got {phi_q.shape[-1]} and {phi_k.shape[-1]}."
        )
