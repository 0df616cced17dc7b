"""Attention as modules: projections around an op. A file a kind, one interface for all (see `multihead`)."""

from typing import TYPE_CHECKING

from tarnn.attention.decay import ChannelDecay, HeadDecay, TokenDecay
from tarnn.attention.linear import LinearAttention
from tarnn.attention.none import NoAttention
from tarnn.attention.registry import names, register
from tarnn.attention.rotary import Rotary
from tarnn.attention.softmax import SoftmaxAttention

if TYPE_CHECKING:
    from tarnn.attention.calibration import calibrating

__all__ = [
    "ChannelDecay",
    "HeadDecay",
    "LinearAttention",
    "NoAttention",
    "Rotary",
    "SoftmaxAttention",
    "TokenDecay",
    "calibrating",
    "names",
    "register",
]


def __getattr__(name: str):
    if name == "calibrating":  # loaded when first used
        from tarnn.attention.calibration import calibrating

        return calibrating
    raise AttributeError(f"module 'tarnn.attention' has no attribute {name!r}; it has {', '.join(__all__)}")
