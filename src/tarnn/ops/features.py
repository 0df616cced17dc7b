"""Features of queries and keys as the ops take them: by the kernels' own maps where they know them, else by the module."""

from typing import NamedTuple

from torch import Tensor, nn

from tarnn.kernels import features as kernel_features
from tarnn.numerics import wide


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


def inputs(feature_map: nn.Module, q: Tensor, k: Tensor) -> Inputs:
    """Attention with a map as the kernels do it: by a function that they know, by a projection and such a function,
    or, with any other module, from its features.

    Raises ValueError if a map has parameters for another number of heads or rows, or doesn't keep leading axes.
    """
    if name := kernel_name(feature_map):
        return Inputs(q, k, name, k.shape[3])
    projected = getattr(feature_map, "projected", None)
    found = None if projected is None else projected(q, k)
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
