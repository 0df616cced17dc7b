"""The functions: linear attention, one step of it, its state, and softmax attention, its rival."""

from tarnn.ops.linear_attention import linear_attention
from tarnn.ops.softmax import KVCache, softmax_attention, softmax_step
from tarnn.ops.state import LinearState
from tarnn.ops.step import step

__all__ = ["KVCache", "LinearState", "linear_attention", "softmax_attention", "softmax_step", "step"]
