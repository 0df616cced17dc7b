"""The delta rule of low rank by the compiled kernels (csrc/delta/low_rank.h): forward, backward, and one token.

The kernels take any strides and any of the four floating types, so nothing is copied here but small things: decays become the
wide type, states contiguous. How the kernels work: docs/kernels.md.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.linear import DTYPES
from tarnn.kernels.low_rank_delta import Call, Gradients, Outputs, Returned
from tarnn.numerics import wide

SEGMENT = (
    256  # positions: forward keeps the state before each segment, backward has room for a sixteenth of those within one
)


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    if not call.q.is_cpu:
        return "The compiled kernels are for CPUs, and these tensors are elsewhere."
    if call.q.dtype not in DTYPES:
        return f"The compiled kernels take float32, bfloat16, float16 and float64; got {call.q.dtype}."
    return library.refusal()


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    outputs = call.new_outputs(state=with_state)
    kept = _new_kept(call) if for_backward else None
    torch.ops.tarnn_cpu.low_rank_forward.default(*_inputs(call), *outputs[:2], kept)
    return outputs._replace(kept=kept)


def backward(call: Call, returned: Returned) -> Gradients:
    grads = call.new_gradients(returned, state=call.S is not None)
    kept, inputs = returned.kept, _inputs(call)
    if kept is None and (kept := _new_kept(call)) is not None:
        torch.ops.tarnn_cpu.low_rank_forward.default(*inputs, call.new_o(), None, kept)
    grad_S = _in_a_row(returned.grad_S, call.dtype)
    torch.ops.tarnn_cpu.low_rank_backward.default(returned.grad_o, grad_S, kept, *inputs, *grads)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token for every row and head in one call; autograd is told of a state that is written in place."""
    S: Any = call.S
    before = S.contiguous()
    after = before if inplace else torch.empty_like(before)
    o = call.new_o()
    torch.ops.tarnn_cpu.low_rank_forward.default(*_inputs(call._replace(S=before)), o, after, None)
    if not inplace:
        return Outputs(o, after)
    if before is not S:
        S.copy_(before)
    increment_version(S)
    return Outputs(o, S)


def _new_kept(call: Call) -> Tensor | None:
    """For the states before all segments of a row and head but the first."""
    (b, h, t, d), e = call.q.shape, call.v.shape[3]
    count = (t - 1) // SEGMENT
    return None if count < 1 else call.q.new_empty(b, h, count, d * e, dtype=call.dtype)


def _in_a_row(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _inputs(call: Call) -> tuple:
    """The call in the order of the kernels' arguments."""
    q, k, v, a, b, decay, S, key_mask, cu_seqlens, scale = call
    dtype, cuts = wide(q.dtype), None if cu_seqlens is None else call.cuts()
    return (
        q,
        k,
        v,
        a,
        b,
        None if decay is None else decay.to(dtype),
        _in_a_row(S, dtype),
        key_mask,
        None if cuts is None else torch.tensor(cuts, dtype=torch.int64, device="cpu"),
        scale,
        SEGMENT,
    )
