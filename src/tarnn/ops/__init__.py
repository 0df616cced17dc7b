"""The functions: linear attention, one step of it, its state, and softmax attention, its rival."""

from tarnn.ops.linear_attention import linear_attention
from tarnn.ops.partition import ClassSums, random_feature_softmax, sum_classes
from tarnn.ops.softmax import KVCache, softmax_attention, softmax_step
from tarnn.ops.state import LinearState
from tarnn.ops.step import step

__all__ = [
    "ClassSums",
    "KVCache",
    "LinearState",
    "linear_attention",
    "random_feature_softmax",
    "softmax_attention",
    "softmax_step",
    "step",
    "sum_classes",
]
