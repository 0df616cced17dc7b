"""Whether a call may go straight to kernels, past operators that torch can see through."""

import torch
from torch import Tensor, nn

_KINDS = (Tensor, nn.Parameter)


def is_plain(x: Tensor) -> bool:
    """Whether x has data and nothing traces what is done with it: no torch.compile, no torch.func, no dispatch mode."""
    if torch.compiler.is_compiling() or type(x) not in _KINDS:
        return False
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())
