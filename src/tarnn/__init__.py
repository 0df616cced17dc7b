"""tarnn: Transformers As RNNs. Attention that is linear in the length of its input, trained in parallel, run as an RNN.

Names are loaded when they are first used, so that `import tarnn` and `tarnn --help` cost nothing: the ops and
layers need torch, the models transformers besides.
"""

from typing import TYPE_CHECKING

from tarnn import auto_classes, moved
from tarnn._version import __version__ as __version__
from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention
    from tarnn.feature_maps import Elu, FeatureMap, PositiveRandomFeatures
    from tarnn.models import TarnnConfig, TarnnForCausalLM
    from tarnn.ops import (
        HybridState,
        KVCache,
        LinearState,
        hybrid_attention,
        hybrid_step,
        linear_attention,
        softmax_attention,
        step,
    )

__all__ = [
    "Elu",
    "FeatureMap",
    "HybridState",
    "KVCache",
    "LinearAttention",
    "LinearState",
    "NoAttention",
    "PositiveRandomFeatures",
    "SoftmaxAttention",
    "TarnnConfig",
    "TarnnForCausalLM",
    "hybrid_attention",
    "hybrid_step",
    "linear_attention",
    "softmax_attention",
    "step",
]

__getattr__, __dir__ = lazy_names(__name__)
auto_classes.announce()
moved.announce()
