"""Models and layers with shapes and no numbers: to be filled from a file, compared with, or counted."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NothingDrawn(TorchFunctionMode):
    """Weights stay as they were allocated: to draw them on the meta device, torch would import its compiler (1.5 s)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_on_meta(kind: Any, config: Any, **options: Any) -> Any:
    """kind(config, …) on the meta device: nothing is allocated."""
    with torch.device("meta"), _NothingDrawn():
        return kind(config, **options)
