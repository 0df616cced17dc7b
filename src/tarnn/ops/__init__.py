"""The functions: linear attention, one step of it, its state; softmax attention, the baseline; and both together."""

import importlib
from typing import TYPE_CHECKING

from tarnn.ops.linear.op import linear_attention
from tarnn.ops.linear.step import step
from tarnn.ops.softmax.op import KVCache, softmax_attention, softmax_step
from tarnn.ops.state import LinearState, NoState, State

if TYPE_CHECKING:
    from tarnn.ops.hybrid.op import hybrid_attention, hybrid_step
    from tarnn.ops.hybrid.state import HybridState
    from tarnn.ops.partition import ClassSums, random_feature_softmax, sum_classes

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

# loaded when first used
_HOME = {
    "ClassSums": "partition",
    "HybridState": "hybrid.state",
    "hybrid_attention": "hybrid.op",
    "hybrid_step": "hybrid.op",
    "random_feature_softmax": "partition",
    "sum_classes": "partition",
}


def __getattr__(name: str):
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(f"tarnn.ops.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module 'tarnn.ops' has no attribute {name!r}; it has {', '.join(__all__)}")
