"""The functions: linear attention, one step of it, its state; softmax attention, the baseline; and both together."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.ops.convolution.op import short_convolution as short_convolution
    from tarnn.ops.convolution.state import ConvolutionState as ConvolutionState
    from tarnn.ops.convolution.step import short_convolution_step as short_convolution_step
    from tarnn.ops.delta.low_rank import (
        low_rank_delta_rule as low_rank_delta_rule,
        low_rank_delta_step as low_rank_delta_step,
    )
    from tarnn.ops.delta.op import delta_rule as delta_rule
    from tarnn.ops.delta.state import DeltaState as DeltaState
    from tarnn.ops.delta.step import delta_step as delta_step
    from tarnn.ops.hybrid.op import hybrid_attention as hybrid_attention, hybrid_step as hybrid_step
    from tarnn.ops.hybrid.state import HybridState as HybridState
    from tarnn.ops.linear.op import linear_attention as linear_attention
    from tarnn.ops.linear.state import LinearState as LinearState
    from tarnn.ops.linear.step import step as step
    from tarnn.ops.partition import (
        ClassSums as ClassSums,
        random_feature_softmax as random_feature_softmax,
        sum_classes as sum_classes,
    )
    from tarnn.ops.scan.diagonal import diagonal_scan as diagonal_scan, diagonal_scan_step as diagonal_scan_step
    from tarnn.ops.scan.selective import selective_scan as selective_scan, selective_scan_step as selective_scan_step
    from tarnn.ops.scan.state import ScanState as ScanState
    from tarnn.ops.softmax.op import softmax_attention as softmax_attention, softmax_step as softmax_step
    from tarnn.ops.softmax.state import KVCache as KVCache
    from tarnn.ops.state import NoState as NoState, State as State

__getattr__, __dir__ = lazy_names(__name__)
