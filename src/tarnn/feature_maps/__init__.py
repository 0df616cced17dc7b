"""Feature maps φ: what linear attention puts in the place of softmax's exponential. One file a family.

Names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarnn.feature_maps.base import FeatureMap
    from tarnn.feature_maps.clusters import QueryClusters
    from tarnn.feature_maps.cosformer import CosFormer
    from tarnn.feature_maps.dpfp import Dpfp
    from tarnn.feature_maps.draws import RandomFeatureMap
    from tarnn.feature_maps.elementwise import Elu, Exp, Identity, Relu, SquaredRelu
    from tarnn.feature_maps.exponential import (
        HyperbolicRandomFeatures,
        PositiveRandomFeatures,
        RegularizedRandomFeatures,
    )
    from tarnn.feature_maps.generalized import GeneralizedFeatures, GeneralizedRandomFeatures
    from tarnn.feature_maps.hedgehog import Hedgehog
    from tarnn.feature_maps.optimal import OptimalRandomFeatures, SderfFeatures
    from tarnn.feature_maps.own import OwnMap
    from tarnn.feature_maps.polynomial import Polynomial2
    from tarnn.feature_maps.registry import as_feature_map, make, names, options_of, register
    from tarnn.feature_maps.reparametrized import Reparametrized
    from tarnn.feature_maps.taylor import Taylor
    from tarnn.feature_maps.trigonometric import GaussianRandomFeatures, TrigonometricRandomFeatures

__all__ = [
    "CosFormer", "Dpfp", "Elu", "Exp", "FeatureMap", "GaussianRandomFeatures", "GeneralizedFeatures",
    "GeneralizedRandomFeatures", "Hedgehog", "HyperbolicRandomFeatures", "Identity", "OptimalRandomFeatures",
    "OwnMap", "Polynomial2", "PositiveRandomFeatures", "QueryClusters", "RandomFeatureMap", "RegularizedRandomFeatures", "Relu",
    "Reparametrized", "SderfFeatures", "SquaredRelu", "Taylor", "TrigonometricRandomFeatures", "as_feature_map",
    "make", "names", "options_of", "register",
]  # fmt: skip

_HOME = {
    "base": ("FeatureMap",),
    "clusters": ("QueryClusters",),
    "cosformer": ("CosFormer",),
    "draws": ("RandomFeatureMap",),
    "dpfp": ("Dpfp",),
    "elementwise": ("Elu", "Exp", "Identity", "Relu", "SquaredRelu"),
    "exponential": ("HyperbolicRandomFeatures", "PositiveRandomFeatures", "RegularizedRandomFeatures"),
    "generalized": ("GeneralizedFeatures", "GeneralizedRandomFeatures"),
    "hedgehog": ("Hedgehog",),
    "optimal": ("OptimalRandomFeatures", "SderfFeatures"),
    "own": ("OwnMap",),
    "polynomial": ("Polynomial2",),
    "registry": ("as_feature_map", "make", "names", "options_of", "register"),
    "reparametrized": ("Reparametrized",),
    "taylor": ("Taylor",),
    "trigonometric": ("GaussianRandomFeatures", "TrigonometricRandomFeatures"),
}


def __getattr__(name: str):
    for home, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"tarnn.feature_maps.{home}"), name)
            return value
    raise AttributeError(f"module 'tarnn.feature_maps' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
