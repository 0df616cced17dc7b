"""Assisted generation of models whose cache is called `cache_params`: transformers asks for `past_key_values` there."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def head_with_one_name(original: Callable) -> Callable:
    """The forward of a language model, whose outputs have their cache by either name."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and hasattr(outputs, "cache_params"):
            outputs.past_key_values = outputs.cache_params
        return outputs

    return forward


def inputs_by_one_name(original: Callable) -> Callable:
    """What `forward` is called with in `generate`, whose cache has the name that the model knows."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.pop("cache_params", None)
        return original(self, *args, cache_params=cache if past_key_values is None else past_key_values, **kwargs)

    # generate() refuses arguments that are not here; assisted generation calls an assistant's with that name
    signature = inspect.signature(original)
    *own, others = signature.parameters.values()
    name = inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY, default=None)
    prepare.__signature__ = signature.replace(parameters=[*own, name, others])  # type: ignore[attr-defined]
    return prepare


def decoding_by_one_name(original: Callable) -> Callable:
    """Assisted decoding, in which the cache that was prepared goes by the name that is asked for."""

    @functools.wraps(original)
    def decode(self: Any, *args: Any, cache_params: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs if cache_params is None else {**kwargs, "past_key_values": cache_params})

    return decode
