"""Attention layers: projections around an op. One file per kind, one interface for all (see `multihead`)."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.attention.calibration import calibrating as calibrating
    from tarnn.attention.decay import ChannelDecay as ChannelDecay, HeadDecay as HeadDecay, TokenDecay as TokenDecay
    from tarnn.attention.gated_delta import GatedDeltaAttention as GatedDeltaAttention
    from tarnn.attention.linear import LinearAttention as LinearAttention
    from tarnn.attention.mamba2 import Mamba2Attention as Mamba2Attention
    from tarnn.attention.none import NoAttention as NoAttention
    from tarnn.attention.registry import names as names, register as register
    from tarnn.attention.rotary import Rotary as Rotary
    from tarnn.attention.rwkv7_layer import Rwkv7Attention as Rwkv7Attention
    from tarnn.attention.softmax import SoftmaxAttention as SoftmaxAttention
    from tarnn.attention.torch_multihead import TorchMultihead as TorchMultihead
    from tarnn.attention.window import WindowAttention as WindowAttention

__getattr__, __dir__ = lazy_names(__name__)
