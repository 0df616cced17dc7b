"""The selective scan in plain PyTorch, any device: the backend that is always there."""

from typing import Any

import torch

from tarnn.kernels.eager import recurrence, refusal as refusal
from tarnn.kernels.selective_scan import Call, Gradients, Outputs


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrence.forward(call, one_chunk)


def backward(call: Call, returned: Any) -> Gradients:
    return recurrence.backward(call, returned, one_chunk)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrence.step(call, one_chunk, inplace)


def one_chunk(call: Call) -> Outputs:
    """h ← e^(dt A) h + dt x B, o = h·C + D x, token by token; masked tokens are absent."""
    x, dt, A, B, C = (tensor.to(call.dtype) for tensor in call[:5])
    absent = None if call.key_mask is None else ~call.key_mask[..., None]
    if absent is not None:
        x, dt, B, C = (tensor.masked_fill(absent, 0.0) for tensor in (x, dt, B, C))
    keep, added = (dt[..., None] * A).exp(), (dt * x)[..., None] * B[:, :, None]  # (b, t, c, n)
    h: Any = call.h
    states = []
    for keep_i, added_i in zip(keep.unbind(1), added.unbind(1)):
        h = torch.addcmul(added_i, keep_i, h)
        states.append(h)
    o = (torch.stack(states, 1) @ C[..., None]).squeeze(-1)  # (b, t, c)
    if call.D is not None:
        o = o + call.D.to(call.dtype) * x
    o = o.to(call.x.dtype)
    return Outputs(o if absent is None else o.masked_fill(absent, 0.0), h)
