"""Feature maps φ: what linear attention has in place of softmax's exponential. One file per family."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.feature_maps.base import FeatureMap
    from tarnn.feature_maps.by_name import as_feature_map, make, options_of
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
    from tarnn.feature_maps.registry import names, register
    from tarnn.feature_maps.reparametrized import Reparametrized
    from tarnn.feature_maps.taylor import Taylor
    from tarnn.feature_maps.trigonometric import GaussianRandomFeatures, TrigonometricRandomFeatures

__all__ = [
    "CosFormer",
    "Dpfp",
    "Elu",
    "Exp",
    "FeatureMap",
    "GaussianRandomFeatures",
    "GeneralizedFeatures",
    "GeneralizedRandomFeatures",
    "Hedgehog",
    "HyperbolicRandomFeatures",
    "Identity",
    "OptimalRandomFeatures",
    "OwnMap",
    "Polynomial2",
    "PositiveRandomFeatures",
    "QueryClusters",
    "RandomFeatureMap",
    "RegularizedRandomFeatures",
    "Relu",
    "Reparametrized",
    "SderfFeatures",
    "SquaredRelu",
    "Taylor",
    "TrigonometricRandomFeatures",
    "as_feature_map",
    "make",
    "names",
    "options_of",
    "register",
]

__getattr__, __dir__ = lazy_names(__name__)
