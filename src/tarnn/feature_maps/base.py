"""The base class of feature maps: φ of one query or key at a time, and a few facts that a map declares."""

import inspect
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn


class Projection(NamedTuple):
    """Features that kernels compute from x themselves, tile by tile, so that they are never stored:

        φ(x) = function(factor·Ω x + β − square·|x|² + offset) + shift          without Ω: function(x)

    function: a name of `kernels.features`. omega, bias: one for all, or one per row or key/value head (a query head
    has that of its key head).
    """

    function: str
    omega: Float[Tensor, "#b #g m d"] | None = None
    bias: Float[Tensor, "#b #g m"] | None = None
    factor: float = 1.0
    square: float = 0.0
    offset: float = 0.0
    shift: float = 0.0


class Projected(NamedTuple):
    """A random-feature map as a projection: the transformed q and k, and log-weights for each.

    φ(q) is the projection of q times e^query_log_weight, φ(k) likewise.
    """

    projection: Projection
    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    query_log_weight: Float[Tensor, "b h t"] | None = None
    key_log_weight: Float[Tensor, "b g s"] | None = None


class FeatureMap(nn.Module):
    """φ: (…, d) → (…, f), applied to each query and each key by itself; attention is then φ(q)·φ(k).

    A map of your own needs no more than an `nn.Module` with a `forward` (see `OwnMap`); with a name as well
    (`tarnn.feature_maps.register`) a config, a checkpoint and the command line can name it. This base class adds what
    the op can make use of: the width of the features before they are computed; whether φ(x)·φ(y) ≥ 0 always (only then
    can their sum normalise); for exponential maps, features with their scale kept apart, so that nothing overflows; and
    for maps that treat queries unlike keys, one method for each.

    A class that derives from another map and overrides `forward`, `scaled`, `queries` or `keys` computes just that: what its
    parent tells kernels (`kernel`, `projected`, `log_features`) counts only if it says so again.

    Three kinds of map say more by their class: `PositionalMap`, `FittedMap` (parameters from the data) and
    `SoftmaxKernelMap` (random features of softmax's kernel).
    """

    positive: bool = True
    """φ(x)·φ(y) ≥ 0 for all x, y. If not, use it with `normalize=False`."""
    log_scaled: bool = False
    """`scaled` returns a log-scale: features of one x may span more than a float's range."""
    log_features: bool = False
    """`log_queries` and `log_keys` give log φ. For maps whose features peak at different keys, many nats apart: sums over
    keys are then kept in units of each feature's own maximum, not of one maximum per head."""
    dot_product: bool = False
    """φ(x)·φ(y) depends on x·y alone, exactly or in expectation: rotary positions turn x and y, not features."""
    kernel: str = ""
    """The name under which the kernels compute this map themselves; empty if they don't know it."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _by_forward: bool = False

    def __init_subclass__(cls, **options: Any):
        """Forget what parents declare about features that this class computes in another way."""
        super().__init_subclass__(**options)
        features = cls._depth("forward", "scaled", "queries", "keys", "exponents")
        if features < cls._depth("log_features", "log_queries", "log_keys"):
            cls.log_features = False
        if features < cls._depth("projected", "projection"):
            cls.projected = FeatureMap.projected  # type: ignore[method-assign]
        if min(features, cls._depth("log_features", "projected", "projection")) < cls._depth("kernel"):
            cls.kernel = ""
        forward, scaled = cls._depth("forward"), cls._depth("scaled")
        cls._by_forward = forward < scaled
        for side in ("queries", "keys"):
            if min(forward, scaled) < cls._depth(side):
                setattr(cls, side, getattr(FeatureMap, side))

    @classmethod
    def _depth(cls, *names: str) -> int:
        """How many classes stand before the first that defines one of these."""
        return next(i for i, c in enumerate(cls.__mro__) if c is FeatureMap or not vars(c).keys().isdisjoint(names))

    def __new__(cls, *args: Any, **kwargs: Any):
        feature_map = super().__new__(cls)
        feature_map.__dict__["_arguments"] = args, kwargs
        return feature_map

    def made_with(self) -> dict[str, Any]:
        """The arguments of the constructor call, by name."""
        args, kwargs = self._arguments
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs).arguments
        return {name: value for name, value in bound.items() if value is not self}

    @property
    def inner(self) -> "FeatureMap":
        """The map itself; of a `Reparametrized`, the map that it wraps."""
        return self

    def check_positive(self, head_dim: int | None = None) -> None:
        """Raise ValueError if the sum of the weights φ(x)·φ(y) can't normalise. head_dim: to try an unknown map."""
        if not self.positive:
            raise ValueError(
                f"{self._get_name()} may give negative weights, whose sum is no normaliser: pass normalize=False "
                "(with a norm on the output) or take a positive map such as Elu()."
            )

    def num_features(self, head_dim: int) -> int:
        """The number of features f for head_dim d."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """φ(x) in the dtype of x, from `scaled`; a map defines this or that."""
        features, scale = self.scaled(x)
        return (features if scale is None else features * scale.exp()[..., None]).to(x.dtype)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """φ(x) as (features, log-scale or None): φ(x) = features · e^log_scale, features (…, f), scale (…).

        The scale is a constant under autograd: the gradient that flows through the features is the whole. Features of
        16-bit x may be float32 (kernels take them as they are), where 16 bits would cost range or digits; `forward` rounds.
        """
        return self(x), None

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """`scaled`, of queries."""
        return (self(q), None) if self._by_forward else self.scaled(q)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """`scaled`, of keys."""
        return (self(k), None) if self._by_forward else self.scaled(k)

    def log_queries(self, q: Tensor) -> Tensor:
        """log φ(q), (…, f), of a map with `log_features`. Its gradient flows through it as a whole."""
        raise NotImplementedError

    def log_keys(self, k: Tensor) -> Tensor:
        """log φ(k), (…, f), of a map with `log_features`."""
        raise NotImplementedError

    def projected(self, q: Tensor, k: Tensor) -> Projected | None:
        """Return the numbers by which a kernel computes the features of q (b, h, t, d) and k (b, g, s, d); None if only
        `queries` and `keys` can."""
        return None

    def initial_buffers(self) -> dict[str, Tensor]:
        """The saved buffers as they are before any training: name → value."""
        return {}


class PositionalMap(FeatureMap):
    """A map that needs to know where its tokens are."""

    def at(self, positions: Int[Tensor, "#b t"] | Int[Tensor, " t"]) -> FeatureMap:
        """This map for tokens at these positions, (t,) or (b, t)."""
        raise NotImplementedError
