"""The functions: linear attention, one step of it, its state, and softmax attention, its rival."""

from typing import TYPE_CHECKING

from tarnn.ops.linear_attention import linear_attention
from tarnn.ops.softmax import KVCache, softmax_attention, softmax_step
from tarnn.ops.state import LinearState, NoState, State
from tarnn.ops.step import step

if TYPE_CHECKING:
    from tarnn.ops.partition import ClassSums, random_feature_softmax, sum_classes

__all__ = [
    "ClassSums",
    "KVCache",
    "LinearState",
    "NoState",
    "State",
    "linear_attention",
    "random_feature_softmax",
    "softmax_attention",
    "softmax_step",
    "step",
    "sum_classes",
]


def __getattr__(name: str):
    if name in ("ClassSums", "random_feature_softmax", "sum_classes"):  # loaded when first used
        from tarnn.ops import partition

        return getattr(partition, name)
    raise AttributeError(f"module 'tarnn.ops' has no attribute {name!r}; it has {', '.join(__all__)}")
