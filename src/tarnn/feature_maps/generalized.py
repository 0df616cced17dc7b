"""Generalized kernels: any function f of random projections ω·x, or of x itself. "Performer-ReLU" names both."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu

from tarnn.feature_maps.base import FeatureMap, Projected, Projection
from tarnn.feature_maps.draws import RandomFeatureMap
from tarnn.feature_maps.registry import register
from tarnn.numerics import full_precision, widen

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, tuple[Function, bool]] = {  # and whether they are ≥ 0
    "relu": (torch.relu, True),
    "exp": (torch.exp, True),
    "abs": (torch.abs, True),
    "sigmoid": (torch.sigmoid, True),
    "gelu": (gelu, False),
    "cos": (torch.cos, False),
}


def _choose(name: str, function: str | Function, epsilon: float, positive: bool | None) -> tuple[Function, bool]:
    """Look up the function, and whether its features are ≥ 0. Raises ValueError for an unknown name."""
    if not epsilon >= 0:
        raise ValueError(f"{name} needs epsilon ≥ 0; got {epsilon}.")
    if callable(function):
        return function, bool(positive)
    if function not in FUNCTIONS:
        raise ValueError(
            f"{name} takes function = {', '.join(FUNCTIONS)}, or a function of your own; got {function!r}."
        )
    known, sign = FUNCTIONS[function]
    return known, sign if positive is None else positive


@register("generalized")
class GeneralizedFeatures(FeatureMap):
    """φ(x) = f(x) + ε, channel by channel: no projection, f = d.

    With relu and ε = 10⁻³ it is what Google's Performer code calls generalized attention by default, whatever
    its `nb_features` says, and what the paper's figures call Performer-ReLU
    (Choromanski et al. 2021, appendix A.4, arXiv 2009.14794). ε keeps a query from meeting no key at all.

    function: relu, exp, abs, sigmoid, gelu, cos, or one of your own, elementwise.
    positive: that f ≥ 0; known for the named ones, and taken to be false for one of your own.
    """

    def __init__(self, function: str | Function = "relu", *, epsilon: float = 1e-3, positive: bool | None = None):
        super().__init__()
        self.function, self.positive = _choose("GeneralizedFeatures", function, epsilon, positive)
        self.function_name, self.epsilon = _name(function), epsilon

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], None]:
        return self.function(widen(x)) + self.epsilon, None

    def extra_repr(self) -> str:
        return f"{self.function_name}, epsilon={self.epsilon:g}"


@register("generalized_random")
class GeneralizedRandomFeatures(RandomFeatureMap):
    """φ(x) = h(x)/√m · (f(ω₁·x) + ε, …, f(ω_m·x) + ε): generalized attention on random projections.

    The kernel is E f(ω·x) f(ω·y) h(x) h(y): for relu an arc-cosine kernel, |x||y| (sin θ + (π − θ) cos θ)/2π.
    Choromanski et al. 2021, eq. 5 and appendix A.4 (arXiv 2009.14794). There is no 1/√d here: relu and abs don't
    care, for the others scale q and k.

    function, positive: as in `GeneralizedFeatures`. "exp" keeps its scale apart, so no x is too large for it.
    h: a function (…, d) → (…) of your own; by default 1. Other arguments as `RandomFeatureMap`.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        function: str | Function = "relu",
        epsilon: float = 1e-3,
        h: Function | None = None,
        positive: bool | None = None,
        directions: str = "orthogonal",
        norms: str = "chi",
        seed: int | None = None,
    ):
        super().__init__(head_dim, num_features, directions=directions, norms=norms, seed=seed)
        self.function, self.positive = _choose("GeneralizedRandomFeatures", function, epsilon, positive)
        if h is not None and not callable(h):
            raise ValueError(f"GeneralizedRandomFeatures takes h, a function of your own, or none; got {h!r}.")
        self.function_name, self.epsilon, self.h = _name(function), epsilon, h
        self.log_scaled = function == "exp"

    def num_features(self, head_dim: int) -> int:
        return self.num_draws

    def projected(self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b g s d"]) -> Projected | None:
        """Only relu without h has this form: relu(u)/√m = relu(u/√m)."""
        self.check_width(q)
        self.check_width(k)
        if self.function_name != "relu" or self.function is not FUNCTIONS["relu"][0] or self.h is not None:
            return None
        factor = self.num_draws**-0.5
        return Projected(Projection("relu", self.omega[None, None], factor=factor, shift=factor * self.epsilon), q, k)

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Tensor, Tensor | None]:
        self.check_width(x)
        wide = widen(x)
        with full_precision(x):
            u = wide @ self.omega.to(wide.dtype).mT
        factor = self.num_draws**-0.5 if self.h is None else self.num_draws**-0.5 * self.h(wide)[..., None]
        if not self.log_scaled:
            return (self.function(u) + self.epsilon) * factor, None
        scale = u.detach().amax(-1, keepdim=True).clamp(min=0)
        return ((u - scale).exp() + self.epsilon * (-scale).exp()) * factor, scale.squeeze(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.function_name}, epsilon={self.epsilon:g}"


def _name(function: str | Function) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
