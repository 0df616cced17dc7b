"""What a layer's forward pass costs in memory, counted exactly: no clock, and nothing that depends on the machine."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Cost(NamedTuple):
    kept: int  # bytes that autograd keeps for the backward pass
    largest: int  # bytes of the largest tensor that was made


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def costs(layer: Any, x: Tensor) -> Cost:
    """Of layer(x)."""
    storages: dict[int, int] = {}

    def keep(y: Tensor) -> Tensor:
        storages[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y), _Largest() as largest:
        y = layer(x.requires_grad_())
    del y
    return Cost(sum(storages.values()), largest.bytes)
