"""The feature maps that every backend computes itself: value, scale and derivative, by name.

name            φ(x)                     φ'(x)
identity        x                        1
elu             1 + x if x > 0, else eˣ   min(φ, 1)
relu            max(x, 0)                1 if x > 0, else 0
squared_relu    max(x, 0)²               2·max(x, 0)
exp             eˣ, its maximum apart    φ
"""

from torch import Tensor

NAMES = ("identity", "elu", "relu", "squared_relu", "exp")


def features(name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """φ(x) for x (…, d) as (features (…, d), log-scale (…) or None); φ = features · e^scale, the scale a constant."""
    match name:
        case "identity":
            return x, None
        case "elu":
            return x.relu() + x.masked_fill(x > 0, 0.0).exp(), None
        case "relu":
            return x.relu(), None
        case "squared_relu":
            return x.relu().square(), None
        case "exp":
            scale = x.detach().amax(-1, keepdim=True)
            return (x - scale).exp(), scale.squeeze(-1)
    raise ValueError(f"the kernels know the feature maps {', '.join(NAMES)}; got {name!r}.")


def features_backward(name: str, x: Tensor, phi: Tensor, grad: Tensor) -> Tensor:
    """∂/∂x from ∂/∂features, for the features as `features` returned them."""
    match name:
        case "identity":
            return grad
        case "elu":
            return grad * phi.clamp(max=1)
        case "relu":
            return grad * (x > 0)
        case "squared_relu":
            return grad * (2 * x.relu())
        case "exp":
            return grad * phi
    raise ValueError(f"the kernels know the feature maps {', '.join(NAMES)}; got {name!r}.")
