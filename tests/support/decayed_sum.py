"""An op, o_i = Σ_{j ≤ i} decay^(i − j) x_j: its records, its file in kernels/eager (`refusal`, `forward`), its function."""

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.eager import packed
from tarnn.kernels.packing import bounds
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.state import State


class Call(NamedTuple):
    x: Tensor  # (b, h, t, d)
    S: Tensor  # (n, h, d)
    key_mask: Tensor | None  # (b, t)
    cu_seqlens: Tensor | None  # (n + 1,)
    decay: float

    def new_outputs(self):
        return Outputs(*[x.new_empty(x.shape) for x in (self.x, self.S)])


class Outputs(NamedTuple):
    o: Tensor
    S: Tensor


def refusal(call: Call) -> None: ...


def forward(call: Call, **hints: bool) -> Outputs:
    if call.cu_seqlens is not None:
        return packed.forward(forward, call, bounds(call.cu_seqlens, call.x.shape[2]), ["x"], ["S"])
    there = torch.ones_like(call.x[:, 0, :, 0]) if call.key_mask is None else call.key_mask.to(call.x.dtype)
    time = torch.nn.functional.pad(there, (1, 0)).cumsum(-1)  # (b, 1 + t): real tokens so far
    # the state is token −1
    x = torch.cat([call.S[:, :, None], call.x.masked_fill(there[:, None, :, None] == 0, 0.0)], 2)
    o = (call.decay ** (time[:, :, None] - time[:, None]).tril()).tril()[:, None] @ x
    return Outputs(o[:, :, 1:].contiguous(), o[:, :, -1].contiguous())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SumState(State):
    S: Tensor


sys.modules["tarnn.kernels.eager.decayed_sum"] = sys.modules[__name__]
compute = Op("decayed_sum", Call, Outputs, NamedTuple("Gradients", [("x", Any), ("S", Any)]), ("o", "S"))
with_operator(compute, "decayed_sum")


def decayed_sum(x, decay=0.5, *, key_mask=None, cu_seqlens=None, state=None, return_state=False):
    rows = (len(x) if cu_seqlens is None else len(cu_seqlens) - 1, x.shape[1], x.shape[3])
    call = Call(x, x.new_zeros(rows) if state is None else state.S, key_mask, cu_seqlens, decay)
    o, S = compute(call, with_state=return_state)
    return (o, SumState(S)) if return_state else o
