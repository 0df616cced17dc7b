"""Feature maps of tarnn's own models, as `features` instructions: what each kind computes, from its tensors and options."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tarnn import feature_maps as maps
from tarnn.families.weights import Weights
from tarnn.feature_maps import FeatureMap, Reparametrized
from tarnn.feature_maps.statistics import FittedMap
from tarnn.models.config import ModelConfig
from tarnn.program.recording import Register, features


def map_of(config: ModelConfig, layer: int, weights: Weights) -> FeatureMap:
    """Make this layer's map: its options from the config, its tensors, such as Ω, from the weights.

    Raises ValueError for a map that causal attention of this config can't have.
    """
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    if "seed" in maps.options_of(name):
        options["seed"] = 0  # the weights hold what was drawn
    with torch.device("meta"):
        phi = maps.make(name, **config.feature_map_sizes(), **options)
    tensors = {name: weights.get(name, tuple(x.shape)) for name, x in phi.state_dict().items()}
    phi.load_state_dict(tensors, assign=True)
    if isinstance(phi, FittedMap) and phi.fit == "call":
        raise ValueError(f"{name} with fit='call' is fitted to both sides, and causal attention has no such map.")
    if config.normalize:
        phi.check_positive(config.head_dim)
    return phi


def features_of(x: Register, phi: FeatureMap, side: str) -> tuple[Register, Register | None]:
    """Record φ of queries or keys: the features, and the logarithm that is kept apart, for maps with one.

    side: "queries" or "keys". Raises ValueError for a map that is not known here.
    """
    kind, d = type(phi.inner), x.width
    if kind not in NUMBERS:
        raise ValueError(
            f"{kind.__name__} is no feature map that programs have; they have those of tarnn.feature_maps."
        )
    numbers = NUMBERS[kind](phi.inner, d)
    if isinstance(phi, Reparametrized):
        numbers["move"] = _move(phi, side)
    made, log_scale = features(x, **numbers)
    return made, log_scale if phi.log_scaled else None


def _move(phi: Reparametrized, side: str) -> dict[str, Any]:
    """Centre and stretch of one side, whose products with the other's centre are the log-weights."""
    q, k, stretch = (x.squeeze(1).double() for x in (phi.query_centre, phi.key_centre, phi.stretch))
    scale = phi.feature_map.scale
    if side == "queries":
        return {"centre": q, "stretch": stretch, "weight": scale * k, "constant": q.new_zeros(len(q))}
    return {"centre": k, "stretch": 1 / stretch, "weight": scale * q, "constant": -scale * (q * k).sum(-1)}


def _elementwise(phi: Any, d: int) -> dict[str, Any]:
    return {"function": phi.kernel}


def _exponential(phi: Any, d: int) -> dict[str, Any]:
    p = phi.projection(torch.float64)
    bias = None if p.bias is None else p.bias[0]
    numbers = {"square": p.square, "offset": p.offset, "number": -math.inf}
    return {"function": p.function, "omega": p.omega[0] * p.factor, "bias": bias, **numbers}


def _waves(phi: Any, factor: float, square: float) -> dict[str, Any]:
    omega = phi.omega[None].double() * factor
    return {"function": "waves", "omega": omega, "square": square, "gain": phi.num_draws**-0.5}


def _generalized(phi: Any, d: int) -> dict[str, Any]:
    name = phi.function_name
    return {"function": "plain_exp" if name == "exp" else name, "shift": phi.epsilon}


def _generalized_random(phi: Any, d: int) -> dict[str, Any]:
    factor, name = phi.num_draws**-0.5, phi.function_name
    numbers = {"gain": factor, "shift": factor * phi.epsilon, "number": 0.0 if name == "exp" else -math.inf}
    return {"function": name, "omega": phi.omega[None], **numbers}


def _taylor(phi: Any, d: int) -> dict[str, Any]:
    scale = d**-0.5 if phi.scale is None else phi.scale
    return {"function": "pairs", "parts": (1.0, scale**0.5, 0.5**0.5 * scale, scale, 0.0, 0.0)}


def _polynomial(phi: Any, d: int) -> dict[str, Any]:
    return {"function": "pairs", "parts": (0.0, 0.0, 1.0, 2**0.5, (2 * phi.offset) ** 0.5, phi.offset)}


NUMBERS: Mapping[type, Callable[[Any, int], dict[str, Any]]] = {
    **dict.fromkeys((maps.Identity, maps.Elu, maps.Relu, maps.SquaredRelu, maps.Exp), _elementwise),
    maps.PositiveRandomFeatures: _exponential,
    maps.HyperbolicRandomFeatures: _exponential,
    maps.RegularizedRandomFeatures: _exponential,
    maps.OptimalRandomFeatures: _exponential,
    maps.SderfFeatures: _exponential,
    maps.GaussianRandomFeatures: lambda phi, d: _waves(phi, 1 / phi.sigma, 0.0),
    maps.TrigonometricRandomFeatures: lambda phi, d: _waves(phi, phi.scale**0.5, -0.5 * phi.scale),
    maps.GeneralizedFeatures: _generalized,
    maps.GeneralizedRandomFeatures: _generalized_random,
    maps.Hedgehog: lambda phi, d: {"function": "halves", "omega": phi.weight},
    maps.Dpfp: lambda phi, d: {"function": "dpfp", "number": phi.nu},
    maps.Taylor: _taylor,
    maps.Polynomial2: _polynomial,
    maps.CosFormer: lambda phi, d: {"function": "cosformer", "number": math.pi / (2 * phi.max_length)},
}
