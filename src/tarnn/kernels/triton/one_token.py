"""A step's one launch. Nothing is read back and no table is made, so that a CUDA graph can record it."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.linear import Call, Outputs
from tarnn.kernels.triton.arguments import Projection, Rows, Spec
from tarnn.kernels.triton.configurations import padded
from tarnn.kernels.triton.launch import launching
from tarnn.kernels.triton.step_kernel import one_token

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
    width = padded(f)
    sizes = {"BE": max(16, min(padded(e), triton.next_power_of_2(TILE // width))), "C": 1}
    decay, weight = (Rows(z) if x is None else Rows.read(x) for x in (call.log_decay, call.key_log_weight))
    values: dict[str, Any] = {
        "q": Rows.read(call.q), "k": Rows.read(call.k), "v": Rows.read(call.v), "decay": decay, "log_weight": weight, "o": o,
        "S": before[0], "z": before[1], "M": z if before[2] is None else before[2],
        "S_new": after[0], "z_new": after[1], "M_new": z if after[2] is None else after[2],
        "projection": Projection.of(call, z), "G": g, "R": h // g, "eps": call.eps,
        "GIVEN": call.key_log_weight is not None, "HAS_M": M is not None,
        "spec": Spec.of(call, decay=call.log_decay is not None, **sizes),
    }  # fmt: skip
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
