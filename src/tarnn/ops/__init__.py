"""The functions: linear attention, one step of it, its state; softmax attention, the baseline; and both together."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.ops.hybrid.op import hybrid_attention, hybrid_step
    from tarnn.ops.hybrid.state import HybridState
    from tarnn.ops.linear.op import linear_attention
    from tarnn.ops.linear.state import LinearState
    from tarnn.ops.linear.step import step
    from tarnn.ops.partition import ClassSums, random_feature_softmax, sum_classes
    from tarnn.ops.softmax.op import softmax_attention, softmax_step
    from tarnn.ops.softmax.state import KVCache
    from tarnn.ops.state import NoState, State

__all__ = [
    "ClassSums",
    "HybridState",
    "KVCache",
    "LinearState",
    "NoState",
    "State",
    "hybrid_attention",
    "hybrid_step",
    "linear_attention",
    "random_feature_softmax",
    "softmax_attention",
    "softmax_step",
    "step",
    "sum_classes",
]

__getattr__, __dir__ = lazy_names(__name__)
