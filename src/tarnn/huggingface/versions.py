"""Differences between the versions of transformers that tarnn runs with: no other file knows them.

The rest of tarnn speaks as transformers 5.24 does: what holds the past is `cache`, as an argument and in outputs. Before, it was
`past_key_values`, and `cache_params` in Mamba's relatives. Whoever calls our models may use any of the three.
"""

import functools
import importlib.metadata
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers.utils.generic import ModelOutput

from tarnn.extras import MissingPackageError

OLD_NAMES = ("past_key_values", "cache_params")
NAMES = ("cache", *OLD_NAMES)
Output = TypeVar("Output", bound=ModelOutput)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


ONE_NAME = _numbers(transformers.__version__) >= (5, 24)  # of a cache, in all models
CACHE = "cache" if ONE_NAME else "past_key_values"  # what `generate` calls it


def cache_name(function: Callable) -> str:
    """The name by which a function takes a cache; of one that takes it as others do, `generate`'s."""
    names = inspect.signature(function).parameters
    return next((name for name in NAMES if name in names), CACHE)


def role(name: str) -> str:
    """Return an argument's role, whatever its name: `cache` for a cache."""
    return "cache" if name in OLD_NAMES else name


def by_role(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by keyword, with the cache as `cache`. Raises TypeError for two caches."""
    given = [name for name in NAMES if name in arguments]
    if given in ([], ["cache"]):
        return dict(arguments)
    caches = [arguments[name] for name in given if arguments[name] is not None]
    if len(caches) > 1:
        raise TypeError(f"one cache goes with a call; got {' and '.join(given)}. Pass cache= alone.")
    return {name: x for name, x in arguments.items() if name not in NAMES} | {"cache": caches[0] if caches else None}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments by keyword; None without."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def cache_of(outputs: Any) -> Any:
    """The cache that a model of transformers returned; None without."""
    return next((getattr(outputs, name) for name in NAMES[not ONE_NAME :] if hasattr(outputs, name)), None)


def as_called(function: Callable, cache: Any) -> dict[str, Any]:
    """A cache as an argument of this function, by keyword."""
    return {cache_name(function): cache}


def for_generate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`, with the cache by the name that it takes."""
    return {CACHE if name == "cache" else name: x for name, x in by_role(arguments).items()}


def takes_any_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a `forward` whose cache is `cache` be called with any name of it. Its signature shows `generate`'s."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **by_role(kwargs))

    signature = inspect.signature(forward)
    parameters = [x.replace(name=CACHE) if x.name == "cache" else x for x in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def with_both_names(kind: type[Output]) -> type[Output]:
    """The class of outputs, made with `cache=`, whose cache has the new name and the old one."""
    if ONE_NAME:
        return kind

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if "cache" in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")
        kind.__init__(self, *args, **kwargs)

    cache = property(lambda self: getattr(self, CACHE), lambda self, x: setattr(self, CACHE, x))
    names = {"__init__": begin, "cache": cache, "__module__": __name__}
    made: Any = type(kind.__name__, (kind,), names)
    globals()[kind.__name__] = made  # where pickle looks
    return made


def hold_keys(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Let a layer of keys and values in a cache hold these."""
    layer.keys, layer.values, layer.is_initialized, layer.device = keys, values, True, keys.device
    if not ONE_NAME:
        layer.dtype = keys.dtype


# assisted generation, which before 5.24 asks for `past_key_values` of models whose cache is `cache_params`


def head_with_one_name(original: Callable) -> Callable:
    """The forward of a language model, whose outputs have their cache by either name."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and hasattr(outputs, "cache_params"):
            outputs.past_key_values = outputs.cache_params
        return outputs

    return original if ONE_NAME else forward


def inputs_by_one_name(original: Callable) -> Callable:
    """Make `forward` take the cache in `generate` by the name that the model knows."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.pop("cache_params", None)
        return original(self, *args, cache_params=cache if past_key_values is None else past_key_values, **kwargs)

    # generate() refuses arguments that are not here; assisted generation calls an assistant's with that name
    signature = inspect.signature(original)
    *own, others = signature.parameters.values()
    name = inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY, default=None)
    prepare.__signature__ = signature.replace(parameters=[*own, name, others])  # type: ignore[attr-defined]
    return original if ONE_NAME else prepare


def decoding_by_one_name(original: Callable) -> Callable:
    """Assisted decoding, in which the cache that was prepared goes by the name that is asked for."""

    @functools.wraps(original)
    def decode(self: Any, *args: Any, cache_params: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs if cache_params is None else {**kwargs, "past_key_values": cache_params})

    return original if ONE_NAME else decode


# which versions


def versions_known() -> str:
    """The range of transformers that tarnn was tested with, as its metadata have it: ">=5.23,<5.25"; "" without metadata."""
    try:
        needed = importlib.metadata.requires("tarnn") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    ranges = (re.match(r"transformers([^;]*)", line) for line in needed)
    return next((",".join(sorted(x[1].strip().split(","), reverse=True)) for x in ranges if x), "")


def check_version() -> None:
    """Raise MissingPackageError for a transformers older than those, and warn of a newer one."""
    for limit in versions_known().split(",") if versions_known() else ():
        here, bound = _numbers(transformers.__version__), _numbers(limit)
        if limit.startswith(">=") and here < bound:
            raise MissingPackageError(
                f"tarnn's models need transformers{versions_known()}; this is {transformers.__version__}: "
                "pip install --upgrade 'tarnn[hf]'."
            )
        if limit.startswith("<") and here >= bound:
            warnings.warn(
                f"transformers {transformers.__version__} is newer than tarnn was tested with ({versions_known()}). What differs "
                f"there may fail: pip install 'transformers{versions_known()}', or a newer tarnn.",
                stacklevel=3,
            )
