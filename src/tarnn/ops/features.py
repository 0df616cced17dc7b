"""Features of queries and keys as the ops take them: by the kernels' own map where they know it, else by the module."""

from torch import Tensor, nn

from tarnn.kernels import features as kernel_features
from tarnn.ops.precision import wide


def kernel_name(feature_map: nn.Module) -> str:
    """The name under which the kernels compute this very map, or "" for any other module."""
    return getattr(feature_map, "kernel", "")


def check_map(feature_map: nn.Module, normalize: bool) -> None:
    """Raises for what is no map, and ValueError for one known to be signed where its sum would normalise."""
    if isinstance(feature_map, type) or not callable(feature_map):
        raise TypeError(f"feature_map must be a module such as tarnn.Elu(); got {feature_map!r}.")
    if normalize and not getattr(feature_map, "positive", True):
        raise ValueError(
            f"{type(feature_map).__name__} features may be negative, so their sum cannot normalise: "
            "pass normalize=False (and a norm on the output), or choose a positive map such as Elu()."
        )


def features(feature_map: nn.Module, x: Tensor, side: str) -> tuple[Tensor, Tensor | None]:
    """φ(x) and its log-scale (or None), for x (b, h, t, d), the "queries" or "keys"; by the kernels' maps in
    float32 at least.

    Raises ValueError if the module does not keep the leading axes.
    """
    if name := kernel_name(feature_map):
        return kernel_features.features(name, x.to(wide(x.dtype)))
    scaled = getattr(feature_map, side, None)
    phi, scale = (feature_map(x), None) if scaled is None else scaled(x)
    if phi.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"a feature map takes (…, d) to (…, f), one token at a time; {type(feature_map).__name__} took "
            f"{tuple(x.shape)} to {tuple(phi.shape)}."
        )
    return phi, scale
