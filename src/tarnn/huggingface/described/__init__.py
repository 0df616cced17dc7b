"""Descriptions of transformers' modules for the fused step, one file per family."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

FILES = {"mamba2": "mamba2", "qwen3_next": "gated_delta", "qwen3_5": "gated_delta", "olmo_hybrid": "gated_delta"}


def classes_of(model: Any) -> Mapping[type, Callable[..., Any]]:
    """The descriptions of the modules of a model, whose class is in one of `transformers.models`."""
    return import_module(f"{__name__}.{FILES[type(model).__module__.split('.')[2]]}").CLASSES
