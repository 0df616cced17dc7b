"""Feature maps φ: what linear attention has in place of softmax's exponential. One file per family."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.feature_maps.base import FeatureMap as FeatureMap
    from tarnn.feature_maps.by_name import as_feature_map as as_feature_map, make as make, options_of as options_of
    from tarnn.feature_maps.clusters import QueryClusters as QueryClusters
    from tarnn.feature_maps.cosformer import CosFormer as CosFormer
    from tarnn.feature_maps.dark import DataAwareRandomFeatures as DataAwareRandomFeatures
    from tarnn.feature_maps.dpfp import Dpfp as Dpfp
    from tarnn.feature_maps.draws import RandomFeatureMap as RandomFeatureMap
    from tarnn.feature_maps.elementwise import (
        Elu as Elu,
        Exp as Exp,
        Identity as Identity,
        Relu as Relu,
        SquaredRelu as SquaredRelu,
    )
    from tarnn.feature_maps.exponential import (
        HyperbolicRandomFeatures as HyperbolicRandomFeatures,
        PositiveRandomFeatures as PositiveRandomFeatures,
        RegularizedRandomFeatures as RegularizedRandomFeatures,
    )
    from tarnn.feature_maps.generalized import (
        GeneralizedFeatures as GeneralizedFeatures,
        GeneralizedRandomFeatures as GeneralizedRandomFeatures,
    )
    from tarnn.feature_maps.hedgehog import Hedgehog as Hedgehog
    from tarnn.feature_maps.optimal import (
        OptimalRandomFeatures as OptimalRandomFeatures,
        SderfFeatures as SderfFeatures,
    )
    from tarnn.feature_maps.own import OwnMap as OwnMap
    from tarnn.feature_maps.polynomial import Polynomial2 as Polynomial2
    from tarnn.feature_maps.registry import names as names, register as register
    from tarnn.feature_maps.reparametrized import Reparametrized as Reparametrized
    from tarnn.feature_maps.taylor import Taylor as Taylor
    from tarnn.feature_maps.trigonometric import (
        GaussianRandomFeatures as GaussianRandomFeatures,
        TrigonometricRandomFeatures as TrigonometricRandomFeatures,
    )

__getattr__, __dir__ = lazy_names(__name__)
