"""Whether what replaces a function of transformers may write to the states that a cache holds."""

import torch
from torch import Tensor


def may_write(x: Tensor) -> bool:
    """No graph is kept, by autograd or torch.compile, that would still need x as it is; and x lies in a row, as steps write."""
    return not keeps_graph() and x.is_contiguous()


def keeps_graph() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()
