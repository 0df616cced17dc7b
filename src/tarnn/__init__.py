"""tarnn: Transformers As RNNs. Attention that is linear in the length of its input, trained in parallel, run as an RNN.

Names are loaded when they are first used, so that `import tarnn` and `tarnn --help` cost nothing: the ops and
layers need torch, the models transformers besides.
"""

from typing import TYPE_CHECKING

from tarnn import auto_classes, removed
from tarnn._version import __version__ as __version__
from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.attention import (
        LinearAttention as LinearAttention,
        NoAttention as NoAttention,
        SoftmaxAttention as SoftmaxAttention,
    )
    from tarnn.decoding.lm import load as load
    from tarnn.feature_maps import (
        Elu as Elu,
        FeatureMap as FeatureMap,
        PositiveRandomFeatures as PositiveRandomFeatures,
    )
    from tarnn.huggingface.patching.fla import patch_fla as patch_fla, unpatch_fla as unpatch_fla
    from tarnn.huggingface.patching.patch import (
        patch_transformers as patch_transformers,
        unpatch_transformers as unpatch_transformers,
    )
    from tarnn.laws.check import check as check
    from tarnn.matmul import fast_matmul as fast_matmul
    from tarnn.models import TarnnConfig as TarnnConfig, TarnnForCausalLM as TarnnForCausalLM
    from tarnn.ops import (
        ConvolutionState as ConvolutionState,
        DeltaState as DeltaState,
        HybridState as HybridState,
        KVCache as KVCache,
        LinearState as LinearState,
        ScanState as ScanState,
        delta_rule as delta_rule,
        delta_step as delta_step,
        diagonal_scan as diagonal_scan,
        diagonal_scan_step as diagonal_scan_step,
        hybrid_attention as hybrid_attention,
        hybrid_step as hybrid_step,
        linear_attention as linear_attention,
        selective_scan as selective_scan,
        selective_scan_step as selective_scan_step,
        short_convolution as short_convolution,
        short_convolution_step as short_convolution_step,
        softmax_attention as softmax_attention,
        step as step,
    )

__getattr__, __dir__ = lazy_names(__name__)
auto_classes.announce()
removed.announce()
