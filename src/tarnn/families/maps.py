"""Feature maps of tarnn as programs compute them: the numbers of `features`, from a map's tensors and options."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tarnn import feature_maps as maps
from tarnn.families.weights import Weights
from tarnn.feature_maps import FeatureMap, QueryClusters, Reparametrized

SIDES = ("queries", "keys")


def map_of(name: str, options: Mapping[str, Any], sizes: Mapping[str, Any], weights: Weights) -> FeatureMap:
    """Make a map of this name: its tensors, such as Ω, are those of the weights. sizes: as `feature_maps.make` takes them.

    Raises ValueError for a name, an option or a size that there is not.
    """
    seed = {"seed": 0} if "seed" in maps.options_of(name) else {}  # the weights hold what was drawn
    try:
        with torch.device("meta"):
            phi = maps.make(name, **sizes, **{**options, **seed})
    except (
        RuntimeError,
        TypeError,
        OverflowError,
    ) as error:  # of sizes that no tensor has, and options of another type
        raise ValueError(f"the feature map {name} can't be made with {dict(options)!r:.80}: {error}") from error
    tensors = {
        name: weights.get(name, tuple(x.shape), whole=not x.is_floating_point()) for name, x in phi.state_dict().items()
    }
    phi.load_state_dict(tensors, assign=True)
    return phi


def numbers_of(phi: FeatureMap, d: int, side: str) -> dict[str, Any]:
    """Return the arguments of `features` that make φ of queries or keys, d channels each; of `QueryClusters` log φ.

    Raises ValueError for a map that is not known here.
    """
    kind = type(phi.inner)
    if kind is QueryClusters:
        return _clusters(phi, side)
    if kind not in NUMBERS:
        raise ValueError(
            f"{kind.__name__} is no feature map that programs have; they have those of tarnn.feature_maps."
        )
    numbers = NUMBERS[kind](phi.inner, d)
    return numbers | ({"move": _move(phi, side)} if isinstance(phi, Reparametrized) else {})


def _move(phi: Reparametrized, side: str) -> dict[str, Any]:
    """Centre and stretch of one side, whose products with the other's centre are the log-weights."""
    q, k, stretch = (x.squeeze(1).double() for x in (phi.query_centre, phi.key_centre, phi.stretch))
    scale = phi.feature_map.scale
    if side == "queries":
        return {"centre": q, "stretch": stretch, "weight": scale * k, "constant": q.new_zeros(len(q))}
    return {"centre": k, "stretch": 1 / stretch, "weight": scale * q, "constant": -scale * (q * k).sum(-1)}


def _clusters(phi: Any, side: str) -> dict[str, Any]:
    centres, sharpness = phi.centres.double(), phi.sharpness.double()
    if side == "keys":
        return {"function": "identity", "omega": phi.scale * centres}
    bias = -0.5 * phi.scale * sharpness[..., 0] * centres.square().sum(-1)
    return {"function": "log_softmax", "omega": phi.scale * sharpness * centres, "bias": bias}


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
    maps.DataAwareRandomFeatures: _exponential,
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
