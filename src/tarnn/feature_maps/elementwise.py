"""Maps that act on each coordinate by itself: f = d, no parameters. The kernels compute these themselves."""

from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.registry import register


class _Elementwise(FeatureMap):
    def num_features(self, head_dim: int) -> int:
        return head_dim


@register("identity")
class Identity(_Elementwise):
    """φ(x) = x: the plain dot product q·k. It may be negative, so it goes with `normalize=False`.

    Lightning Attention, Mamba-2 and RetNet take this map with a decay.
    """

    positive = False
    kernel = "identity"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x


@register("elu")
class Elu(_Elementwise):
    """φ(x) = elu(x) + 1: 1 + x where x > 0, eˣ elsewhere. Always positive, never flat.

    Written as eˣ, not as (eˣ − 1) + 1, so that small features keep all their digits.
    Katharopoulos et al. 2020, eq. 7 (arXiv 2006.16236).

    >>> Elu()(torch.tensor([-30.0, 0.0, 2.0]))
    tensor([9.3576e-14, 1.0000e+00, 3.0000e+00])
    """

    kernel = "elu"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x.relu() + x.masked_fill(x > 0, 0.0).exp()  # clamp(max=0) has no slope at 0 from torch 2.15 on


@register("relu")
class Relu(_Elementwise):
    """φ(x) = max(x, 0). A query whose features are all zero attends to nothing: its output is zero.

    "Performer-ReLU" without a projection (Choromanski et al. 2021, appendix A.4, arXiv 2009.14794).
    """

    kernel = "relu"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x.relu()


@register("squared_relu")
class SquaredRelu(_Elementwise):
    """φ(x) = max(x, 0)²: as `Relu`, with sharper contrasts and a gradient that is continuous."""

    kernel = "squared_relu"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x.relu().square()


@register("exp")
class Exp(_Elementwise):
    """φ(x) = eˣ, coordinate by coordinate; used with its scale apart, so no x is too large.

    As attention weights these are Σ_f e^(q_f + k_f), not e^(q·k): for that, see random features.
    """

    kernel = "exp"
    log_scaled = True

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x.exp()

    def scaled(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
        scale = x.detach().amax(-1, keepdim=True)
        return (x - scale).exp(), scale.squeeze(-1)
