"""Which calls may go straight to the compiled kernels, past torch's dispatcher and its autograd."""

import torch
from torch import Tensor, nn

from tarnn.kernels import cpu

_PLAIN = (Tensor, nn.Parameter)


def goes_straight(q: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing but the numbers is wanted: real tensors, no gradient, no tracing, no torch.func around.

    An operator with autograd costs tens of microseconds a call, which is more than a token's arithmetic.
    """
    if torch.compiler.is_compiling() or type(q) not in _PLAIN or not cpu.serves(q):
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    if not torch.is_grad_enabled():
        return True
    return not q.requires_grad and not any(x is not None and x.requires_grad for x in others)
