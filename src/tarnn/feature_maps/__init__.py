"""Feature maps φ: what linear attention puts in the place of softmax's exponential. One file a family."""

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.dpfp import Dpfp
from tarnn.feature_maps.elementwise import Elu, Exp, Identity, Relu, SquaredRelu
from tarnn.feature_maps.hedgehog import Hedgehog
from tarnn.feature_maps.polynomial import Polynomial2

__all__ = ["Dpfp", "Elu", "Exp", "FeatureMap", "Hedgehog", "Identity", "Polynomial2", "Relu", "SquaredRelu"]
