"""Attention as modules: projections around an op. A file a kind, one interface for all (see `multihead`)."""

from tarnn.attention.calibration import calibrating
from tarnn.attention.decay import ChannelDecay, HeadDecay, TokenDecay
from tarnn.attention.linear import LinearAttention
from tarnn.attention.none import NoAttention
from tarnn.attention.rotary import Rotary
from tarnn.attention.softmax import SoftmaxAttention

__all__ = [
    "ChannelDecay",
    "HeadDecay",
    "LinearAttention",
    "NoAttention",
    "Rotary",
    "SoftmaxAttention",
    "TokenDecay",
    "calibrating",
]
