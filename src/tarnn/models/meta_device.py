"""Build models and layers that have shapes but no numbers: to be filled from a file, or counted."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NoInitialWeights(TorchFunctionMode):
    """Skip `torch.nn.init`: to draw weights on the meta device, torch would import its compiler (1.5 s)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_on_meta(kind: Any, config: Any, **options: Any) -> Any:
    """Return kind(config, …) on the meta device: nothing is allocated, and torch's next random numbers stay the same."""
    with torch.random.fork_rng(devices=()), torch.device("meta"), _NoInitialWeights():
        return kind(config, **options)
