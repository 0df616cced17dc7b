"""Whether a call may go straight to kernels, past operators that torch can see through: nothing traces or transforms it."""

import math

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_KINDS = (Tensor, nn.Parameter)


def is_untraced(x: Tensor) -> bool:
    """Whether x has data and nothing traces what is done with it: no torch.compile, torch.jit, transform or dispatch mode."""
    if torch.compiler.is_compiling() or type(x) not in _KINDS or torch._C._is_tracing():
        return False
    return not (is_transformed() or torch._C._len_torch_dispatch_stack())


def known_finite(*tensors: Tensor) -> bool:
    """Whether these hold no NaN and no infinity, for one pass over them. Looked at is only what is a plain tensor of a CPU, where
    looking stops nothing; of all others nothing is known. (A sum with either is neither finite; one of finite numbers may
    overflow, and then nothing is known.)"""
    return all(x.is_cpu and is_untraced(x) and math.isfinite(x.detach().sum().item()) for x in tensors)


def is_transformed() -> bool:
    """Whether torch.func or a forward-mode derivative is at work: both see through plain operations only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
