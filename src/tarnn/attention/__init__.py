"""Attention as modules: projections around an op. A file a kind, one interface for all (see `multihead`)."""

import importlib
from typing import TYPE_CHECKING

from tarnn.attention.decay import ChannelDecay, HeadDecay, TokenDecay
from tarnn.attention.linear import LinearAttention
from tarnn.attention.none import NoAttention
from tarnn.attention.registry import names, register
from tarnn.attention.rotary import Rotary
from tarnn.attention.softmax import SoftmaxAttention

if TYPE_CHECKING:
    from tarnn.attention.calibration import calibrating
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

_HOME = {"calibrating": "calibration", "TorchMultihead": "torch_multihead"}


def __getattr__(name: str):
    if name in _HOME:  # loaded when first used
        return getattr(importlib.import_module(f"tarnn.attention.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tarnn.attention' has no attribute {name!r}; it has {', '.join(__all__)}")
