"""Feature maps as the fused step makes them (csrc/model_step/features.h): a recipe per map.

x ← (x − centre)·stretch      u = Ω x + bias − square·|x|² + offset      φ = gain·function(u) + shift
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps import (
    CosFormer,
    Dpfp,
    FeatureMap,
    GaussianRandomFeatures,
    GeneralizedFeatures,
    GeneralizedRandomFeatures,
    Hedgehog,
    Polynomial2,
    Reparametrized,
    Taylor,
    TrigonometricRandomFeatures,
)
from tarnn.feature_maps.generalized import FUNCTIONS as GENERALIZED
from tarnn.feature_maps.statistics import FittedMap
from tarnn.kernels.features import NAMES


class Move(NamedTuple):
    """(x − centre)·stretch, with weight·x + constant as its log-weight: (1 or g, d) each, the constant (1 or g,)."""

    centre: Tensor
    stretch: Tensor
    weight: Tensor
    constant: Tensor


class Recipe(NamedTuple):
    """How the kernel makes the features of a map; function: a name of `kernels.cpu.stack.FUNCTIONS`."""

    function: str
    omega: Tensor | None = None  # (1 or g, m, d)
    bias: Tensor | None = None  # (1 or g, m)
    square: float = 0.0
    offset: float = 0.0
    gain: float = 1.0
    shift: float = 0.0
    number: float = -math.inf  # exp: the least that its logarithm may be; dpfp: ν; cosformer: the angle per position
    parts: tuple[float, ...] = ()  # of pairs: 1, x, x², x_i·x_j, x, 1, with these factors
    queries: Move | None = None
    keys: Move | None = None

    @property
    def made_here(self) -> bool:
        """Whether it takes more than one of the maps that attention's own step knows."""
        plain = self.omega is None and self.queries is None and (self.gain, self.shift) == (1.0, 0.0)
        return not plain or self.function not in NAMES


def recipe(feature_map: FeatureMap, head_dim: int) -> Recipe | None:
    """That of a map, or None for one that the fused step can't make."""
    if feature_map.kernel:
        return Recipe(feature_map.kernel)
    if write := _WRITERS.get(type(feature_map)):
        return write(feature_map, head_dim)
    heads = feature_map.num_heads if isinstance(feature_map, FittedMap) else 1
    x = torch.zeros(1, heads, 1, head_dim)
    found = feature_map.projected(x, x)  # the projection is that of any x
    if found is None:
        return None
    p = found.projection
    assert p.omega is not None
    bias = None if p.bias is None else p.bias[0]
    return Recipe(p.function, p.omega[0] * p.factor, bias, p.square, p.offset, shift=p.shift)


def _moved(feature_map: Reparametrized, head_dim: int) -> Recipe | None:
    inner = recipe(feature_map.feature_map, head_dim)
    if inner is None:
        return None
    q, k, stretch = (getattr(feature_map, name).squeeze(1) for name in ("query_centre", "key_centre", "stretch"))
    scale = feature_map.feature_map.scale
    none = q.new_zeros(len(q))
    return inner._replace(
        queries=Move(q, stretch, scale * k, none), keys=Move(k, 1 / stretch, scale * q, -scale * (q * k).sum(-1))
    )


def _generalized(feature_map: GeneralizedFeatures, head_dim: int) -> Recipe | None:
    name = feature_map.function_name
    if feature_map.function is not GENERALIZED.get(name, (None,))[0]:
        return None
    return Recipe("plain_exp" if name == "exp" else name, gain=1.0, shift=feature_map.epsilon)


def _generalized_random(feature_map: GeneralizedRandomFeatures, head_dim: int) -> Recipe | None:
    name, factor = feature_map.function_name, feature_map.num_draws**-0.5
    if feature_map.h is not None or feature_map.function is not GENERALIZED.get(name, (None,))[0]:
        return None
    return Recipe(
        name,
        feature_map.omega[None],
        gain=factor,
        shift=factor * feature_map.epsilon,
        number=0.0 if name == "exp" else -math.inf,
    )


def _waves(feature_map: Any, factor: float, square: float) -> Recipe:
    gain = feature_map.num_draws**-0.5
    return Recipe("waves", feature_map.omega[None] * factor, square=square, gain=gain)


def _taylor(feature_map: Taylor, head_dim: int) -> Recipe:
    scale = head_dim**-0.5 if feature_map.scale is None else feature_map.scale
    return Recipe("pairs", parts=(1.0, scale**0.5, 0.5**0.5 * scale, scale, 0.0, 0.0))


def _polynomial(feature_map: Polynomial2, head_dim: int) -> Recipe:
    offset = feature_map.offset
    return Recipe("pairs", parts=(0.0, 0.0, 1.0, 2**0.5, (2 * offset) ** 0.5, offset))


_WRITERS: dict[type, Callable[[Any, int], Recipe | None]] = {
    Reparametrized: _moved,
    GeneralizedFeatures: _generalized,
    GeneralizedRandomFeatures: _generalized_random,
    Taylor: _taylor,
    Polynomial2: _polynomial,
    Dpfp: lambda phi, _: Recipe("dpfp", number=phi.nu),
    Hedgehog: lambda phi, _: Recipe("halves", phi.weight),
    CosFormer: lambda phi, _: Recipe("cosformer", number=math.pi / (2 * phi.max_length)),
    GaussianRandomFeatures: lambda phi, _: _waves(phi, 1 / phi.sigma, 0.0),
    # e^(scale·|x|²/2) is their log-scale
    TrigonometricRandomFeatures: lambda phi, _: _waves(phi, phi.scale**0.5, -0.5 * phi.scale),
}
