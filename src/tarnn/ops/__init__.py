"""The functions: linear attention, one step of it, its state; softmax attention, the baseline; and both together."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.ops.convolution.op import (
        short_convolution as short_convolution,
        short_convolution_step as short_convolution_step,
    )
    from tarnn.ops.delta.low_rank import (
        low_rank_delta_rule as low_rank_delta_rule,
        low_rank_delta_step as low_rank_delta_step,
    )
    from tarnn.ops.delta.op import delta_rule as delta_rule, delta_step as delta_step
    from tarnn.ops.hybrid.op import hybrid_attention as hybrid_attention, hybrid_step as hybrid_step
    from tarnn.ops.linear.op import linear_attention as linear_attention, step as step
    from tarnn.ops.partition import (
        ClassSums as ClassSums,
        random_feature_softmax as random_feature_softmax,
        sum_classes as sum_classes,
    )
    from tarnn.ops.scan.op import (
        diagonal_scan as diagonal_scan,
        diagonal_scan_step as diagonal_scan_step,
        selective_scan as selective_scan,
        selective_scan_step as selective_scan_step,
    )
    from tarnn.ops.softmax.cache import KVCache as KVCache
    from tarnn.ops.softmax.op import softmax_attention as softmax_attention, softmax_step as softmax_step
    from tarnn.ops.state import NoState as NoState, State as State
    from tarnn.ops.states import (
        ConvolutionState as ConvolutionState,
        DeltaState as DeltaState,
        HybridState as HybridState,
        LinearState as LinearState,
        ScanState as ScanState,
    )

__getattr__, __dir__ = lazy_names(__name__)
