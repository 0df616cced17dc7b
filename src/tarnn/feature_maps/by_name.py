"""Make feature maps from names, from other modules, or from a `FeatureMap` itself.

A map takes from the model that it is put into those arguments of its constructor that are in `OF_THE_MODEL`; the
others are its options. Estimates of softmax's kernel function take two more, `MOVES`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.draws import SoftmaxKernelMap
from tarnn.feature_maps.own import OwnMap
from tarnn.feature_maps.registry import MAPS
from tarnn.feature_maps.reparametrized import Reparametrized
from tarnn.feature_maps.statistics import FittedMap
from tarnn.registry import arguments_of

OF_THE_MODEL = {"head_dim", "num_heads", "max_length"}
MOVES = {"centre", "balance"}  # these options put a `Reparametrized` around the map


def options_of(name: str) -> frozenset[str]:
    """The options of the map of this name. Raises ValueError for an unknown name."""
    kind = MAPS.find(name).kind
    return arguments_of(kind) - OF_THE_MODEL | (MOVES if issubclass(kind, SoftmaxKernelMap) else set())


def make(name: str, *, head_dim: int, num_heads: int = 1, max_length: int | None = None, **options: Any) -> FeatureMap:
    """Make the map of this name, for heads of width head_dim.

    num_heads: key/value heads, for maps with parameters for each head. max_length: the longest sequence, for maps
    that must know it. options: the others, as `options_of` lists them.

    Raises ValueError for an unknown name, and for options that the map does not have or can't take.

    >>> make("favor", head_dim=64, num_features=128, seed=0)
    PositiveRandomFeatures(head_dim=64, num_features=128, directions=orthogonal, scale=0.125)
    """
    MAPS.check_options(name, options, options_of(name))
    kind, implied = MAPS.find(name)
    moves = {key: bool(options.pop(key, implied.get(key))) for key in MOVES}
    of_model = {"head_dim": head_dim, "num_heads": num_heads, "max_length": max_length}
    if max_length is None and "max_length" in arguments_of(kind):
        raise ValueError(
            f"the feature map {name!r} needs to know the longest sequence: max_length= "
            "(max_position_embeddings in a model's config)."
        )
    feature_map = MAPS.build(name, of_model, options)
    if not any(moves.values()):
        return feature_map
    return Reparametrized(feature_map, num_heads=num_heads, fit=_fit_of(feature_map), **moves)


def _fit_of(feature_map: FeatureMap) -> str:
    return feature_map.fit if isinstance(feature_map, FittedMap) else "calibrated"


def as_feature_map(feature_map: FeatureMap | nn.Module | str, *, head_dim: int, **of_model: Any) -> FeatureMap:
    """Turn a name (by `make`), a map (returned as it is) or any other module (…, d) → (…, f) into a map.

    Raises TypeError for anything else.
    """
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if isinstance(feature_map, str):
        return make(feature_map, head_dim=head_dim, **of_model)
    if isinstance(feature_map, type) or not callable(feature_map):
        raise TypeError(
            "feature_map must be a name (tarnn.feature_maps.names()) or a module such as tarnn.Elu(); "
            f"got {feature_map!r}."
        )
    return OwnMap(feature_map)


def map_for(feature_map: FeatureMap | nn.Module | str, x: Tensor) -> FeatureMap:
    """Do the same for an op on x (…, d). A name always means the same map: random features are drawn from seed 0.

    torch.compile can't see through the making of a map: call the function once before it is compiled, or pass a map.
    """
    if isinstance(feature_map, str):
        key = f"{feature_map} {x.shape[-1]} {x.device}"
        if key not in _SHARED:
            _SHARED[key] = _make_shared(feature_map, x.shape[-1], x.device)
        return _SHARED[key]
    return as_feature_map(feature_map, head_dim=x.shape[-1])


_SHARED: dict[str, FeatureMap] = {}


def _make_shared(name: str, head_dim: int, device: torch.device) -> FeatureMap:
    seed = {"seed": 0} if "seed" in options_of(name) else {}
    # kept for other calls, whatever surrounds this one
    with torch.inference_mode(False), torch.device(device):
        feature_map = make(name, head_dim=head_dim, **seed)
    if any(True for _ in feature_map.parameters()):
        raise ValueError(
            f"the feature map {name!r} has parameters to be trained: make it yourself, as in "
            f"feature_map={feature_map._get_name()}(…), or name it in a layer."
        )
    return feature_map


def described(feature_map: FeatureMap) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The arguments with which `make` makes this map again: (name, options, those that come from a model).

    Raises ValueError for a map without a name.
    """
    inner = feature_map.inner
    name, arguments = MAPS.name_of(type(inner)), inner.made_with()
    if isinstance(feature_map, Reparametrized):
        arguments |= {key: getattr(feature_map, key) for key in MOVES}
        arguments |= {"fit": feature_map.fit} if feature_map.fit != _fit_of(inner) else {}
        arguments |= {key: x for key, x in feature_map.made_with().items() if key == "num_heads"}
    of_model = {key: arguments.pop(key) for key in OF_THE_MODEL & set(arguments)}
    return name, arguments, of_model
