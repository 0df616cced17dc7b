"""tarnn: Transformers As RNNs. Attention that is linear in the length of its input, trained in parallel, run as an RNN.

Names are loaded when they are first used, so that `import tarnn` and `tarnn --help` cost nothing: the ops and
layers need torch, the models transformers besides.
"""

import importlib
from typing import TYPE_CHECKING

from tarnn import auto_classes, moved
from tarnn._version import __version__ as __version__

if TYPE_CHECKING:
    from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention
    from tarnn.feature_maps import Elu, FeatureMap, PositiveRandomFeatures
    from tarnn.models import TarnnConfig, TarnnForCausalLM
    from tarnn.ops import (
        HybridState,
        KVCache,
        LinearState,
        hybrid_attention,
        hybrid_step,
        linear_attention,
        softmax_attention,
        step,
    )

__all__ = [
    "Elu",
    "FeatureMap",
    "HybridState",
    "KVCache",
    "LinearAttention",
    "LinearState",
    "NoAttention",
    "PositiveRandomFeatures",
    "SoftmaxAttention",
    "TarnnConfig",
    "TarnnForCausalLM",
    "hybrid_attention",
    "hybrid_step",
    "linear_attention",
    "softmax_attention",
    "step",
]

_HOME = {
    "tarnn.ops": (
        "HybridState",
        "KVCache",
        "LinearState",
        "hybrid_attention",
        "hybrid_step",
        "linear_attention",
        "softmax_attention",
        "step",
    ),
    "tarnn.feature_maps": ("Elu", "FeatureMap", "PositiveRandomFeatures"),
    "tarnn.attention": ("LinearAttention", "NoAttention", "SoftmaxAttention"),
    "tarnn.models": ("TarnnConfig", "TarnnForCausalLM"),
}
_ROOMS = (
    "analysis",
    "attention",
    "conversion",
    "data",
    "decoding",
    "feature_maps",
    "huggingface",
    "kernels",
    "models",
    "ops",
    "tasks",
    "training",
)


auto_classes.announce()
moved.announce()


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"tarnn.{name}")
    for home, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module 'tarnn' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
