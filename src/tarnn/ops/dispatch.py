"""Which calls may go straight to the compiled kernels, past torch's dispatcher."""

import torch
from torch import Tensor, nn

from tarnn.kernels import cpu

_PLAIN = (Tensor, nn.Parameter)


def goes_straight(q: Tensor) -> bool:
    """Whether this is a call on real tensors: nothing traces it, no torch.func is around, the kernels serve.

    The operator, with its schema and autograd in Python, costs hundreds of microseconds a call, forward and
    backward: more than the arithmetic of a short sequence.
    """
    if torch.compiler.is_compiling() or type(q) not in _PLAIN or not cpu.serves(q):
        return False
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
