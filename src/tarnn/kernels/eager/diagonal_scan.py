"""The diagonal scan in plain PyTorch, any device: the backend that is always there."""

from typing import Any

import torch

from tarnn.kernels.diagonal_scan import Call, Gradients, Outputs
from tarnn.kernels.eager import recurrence, refusal as refusal


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrence.forward(call, one_chunk)


def backward(call: Call, returned: Any) -> Gradients:
    return recurrence.backward(call, returned, one_chunk)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrence.step(call, one_chunk, inplace)


def one_chunk(call: Call) -> Outputs:
    """h ← e^log_decay h + x, token by token; masked tokens are absent."""
    x, log_decay = call.x.to(call.dtype), call.log_decay.to(call.dtype)
    h: Any = call.h
    absent = None if call.key_mask is None else ~call.key_mask[..., None]
    if absent is not None:
        x, log_decay = x.masked_fill(absent, 0.0), log_decay.masked_fill(absent, 0.0)
    states = []
    for x_i, keep in zip(x.unbind(1), log_decay.exp().unbind(1)):
        h = torch.addcmul(x_i, keep, h)
        states.append(h)
    o = torch.stack(states, 1).to(call.x.dtype)
    return Outputs(o if absent is None else o.masked_fill(absent, 0.0), h)
