"""Attention layers: projections around an op. One file per kind, one interface for all (see `multihead`)."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.attention.calibration import calibrating
    from tarnn.attention.decay import ChannelDecay, HeadDecay, TokenDecay
    from tarnn.attention.linear import LinearAttention
    from tarnn.attention.none import NoAttention
    from tarnn.attention.registry import names, register
    from tarnn.attention.rotary import Rotary
    from tarnn.attention.softmax import SoftmaxAttention
    from tarnn.attention.torch_multihead import TorchMultihead

__all__ = [
    "ChannelDecay",
    "HeadDecay",
    "LinearAttention",
    "NoAttention",
    "Rotary",
    "SoftmaxAttention",
    "TokenDecay",
    "TorchMultihead",
    "calibrating",
    "names",
    "register",
]

__getattr__, __dir__ = lazy_names(__name__)
