"""tarnn: Transformers As RNNs. Attention that is linear in the length of its input, trained in parallel, run as an RNN."""

import importlib

from tarnn._version import __version__ as __version__
from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention
from tarnn.feature_maps import Elu, FeatureMap
from tarnn.ops import KVCache, LinearState, linear_attention, softmax_attention, step

__all__ = [
    "Elu",
    "FeatureMap",
    "KVCache",
    "LinearAttention",
    "LinearState",
    "NoAttention",
    "SoftmaxAttention",
    "TarnnConfig",
    "TarnnForCausalLM",
    "linear_attention",
    "softmax_attention",
    "step",
]

_MODELS = ("TarnnConfig", "TarnnForCausalLM")  # they need transformers, which takes a second to import


def __getattr__(name: str):
    if name in _MODELS:
        return getattr(importlib.import_module("tarnn.models"), name)
    raise AttributeError(f"module 'tarnn' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *_MODELS]
