"""What a feature map is: φ of one query or key at a time, and a few facts that it declares about itself."""

from torch import Tensor, nn


class FeatureMap(nn.Module):
    """φ: (…, d) → (…, f), applied to each query and each key by itself; attention is then φ(q)·φ(k).

    A map of your own needs no more than an `nn.Module` with a `forward`. What this base class adds is what
    the op can make use of: the width of the features before they are computed, whether φ(x)·φ(y) ≥ 0 always
    (only then may its sum normalise), for maps of the exponential kind features with their scale kept apart so
    that nothing overflows, and for maps that treat queries unlike keys, one method for each.
    """

    positive: bool = True
    """φ(x)·φ(y) ≥ 0 for all x, y. If not, use it with `normalize=False`."""
    learnable: bool = False
    """It has parameters that are trained."""
    random: bool = False
    """It has random draws, which belong in a checkpoint."""
    log_scaled: bool = False
    """`scaled` returns a log-scale: features of one x may span more than a float's range."""
    positional: bool = False
    """It needs to know where its tokens are: `at(positions)` is the map for them."""
    dot_product: bool = False
    """φ(x)·φ(y) depends on x·y alone, exactly or in expectation: rotary positions turn x and y, not features."""
    kernel: str = ""
    """The name under which the kernels compute this map themselves; empty if they don't know it."""

    def num_features(self, head_dim: int) -> int:
        """f for a given d."""
        raise NotImplementedError

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """φ(x) as (features, log-scale or None): φ(x) = features · e^log_scale, features (…, f), scale (…).

        The scale is a constant under autograd: the gradient that flows through the features is the whole.
        """
        return self(x), None

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """`scaled`, of queries."""
        return self.scaled(q)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """`scaled`, of keys."""
        return self.scaled(k)

    def initial_buffers(self) -> dict[str, Tensor]:
        """Buffers that are saved with the map, as they are before any training: name → value."""
        return {}
