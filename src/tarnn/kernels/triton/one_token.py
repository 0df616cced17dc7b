"""A step's one launch. Nothing is read back and no table is made, so that a CUDA graph can record it."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.linear import Call, Outputs
from tarnn.kernels.triton.configurations import padded
from tarnn.kernels.triton.launch import launching, map_of
from tarnn.kernels.triton.step_kernel import one_token
from tarnn.kernels.triton.strides import in_rows, strides

TILE = 64 * 64  # elements of a state that a program holds at once


def step(call: Call, inplace: bool) -> Outputs:
    """One token for every row and head; autograd is told of tensors that are written in place."""
    S: Any
    z: Any
    M: Any
    S, z, M = call.S, call.z, call.M
    (b, h, *_), g, e, f = call.q.shape, call.k.shape[1], call.v.shape[3], call.num_features
    weighted = call.weighted
    before = (S.contiguous(), z.contiguous(), None if M is None else M.contiguous())
    made = M is not None or not weighted
    room = M if made else z.new_empty(b, g)
    after = before if inplace and made else (*(before[:2] if inplace else map(torch.empty_like, before[:2])), room)
    if not inplace and M is not None:
        after = (*after[:2], torch.empty_like(M, memory_format=torch.contiguous_format))
    o = call.v.new_empty(b, h, 1, e)
    q, k, v = (in_rows(x) for x in (call.q, call.k, call.v))
    width = padded(f)
    values: dict[str, Any] = {
        "q": q, **strides("q", q, 2), "k": k, **strides("k", k, 2), "v": v, **strides("v", v, 2), "o": o,
        "S": before[0], "z": before[1], "M": q if before[2] is None else before[2],
        "S_new": after[0], "z_new": after[1], "M_new": q if after[2] is None else after[2],
        "G": g, "R": h // g, "F": f, "E": e, "BF": width, "MAP": map_of(call),
        "BE": max(16, min(padded(e), triton.next_power_of_2(TILE // width))),
        "DECAY": call.log_decay is not None, "CHANNELS": call.has_channels, "WEIGHTED": weighted,
        "GIVEN": call.key_log_weight is not None, "HAS_M": M is not None, "NORMALIZE": call.normalize,
        "eps": call.eps, "factor": call.factor, "square": call.square, "offset": call.offset, "shift": call.shift,
    }  # fmt: skip
    for name, x in (("omega", call.omega), ("bias", call.bias)):
        x = None if x is None else x.to(torch.float32).contiguous()
        values |= {name: q if x is None else x, **strides(name, x, 2)}
    decay = in_rows(call.log_decay) if call.has_channels and call.log_decay is not None else call.log_decay
    for name, short, x in (("decay", "decay", decay), ("log_weight", "weight", call.key_log_weight)):
        values |= {name: q if x is None else x, **strides(short, x, 2)}
    with launching(one_token):
        one_token[(b, g)](**{name: values[name] for name in one_token.arg_names}, num_warps=4)
    if not inplace:
        return Outputs(o, None, *after)
    return Outputs(o, None, *_written((S, z, M), after))


def _written(states: tuple[Tensor, Tensor, Tensor | None], after: tuple) -> tuple:
    """The caller's tensors with what a kernel wrote, in them or in copies that lie in a row."""
    for x, y in zip(states, after):
        if x is not None and x is not y:
            x.copy_(y)
    increment_version([x for x in states if x is not None])
    return (*states[:2], after[2] if states[2] is None else states[2])
