"""The functions: linear attention, one step of it, its state, and softmax attention, its rival."""

from tarnn.ops.linear_attention import linear_attention
from tarnn.ops.state import LinearState
from tarnn.ops.step import step

__all__ = ["LinearState", "linear_attention", "step"]
