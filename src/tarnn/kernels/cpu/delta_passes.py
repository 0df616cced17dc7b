"""The passes of both delta rules around their compiled kernels: what is kept, and where a state is written."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu.arguments import in_a_row

# positions: forward keeps the state before each segment; backward has room for the states within one, or a part of them
SEGMENT = 256


def forward(call: Any, run: Any, for_backward: bool, with_state: bool) -> Any:
    """The outputs, by run(call, o, the state behind, kept)."""
    outputs = call.new_outputs(state=with_state)
    kept = new_kept(call) if for_backward else None
    run(call, *outputs[:2], kept)
    return outputs._replace(kept=kept)


def new_kept(call: Any) -> Tensor | None:
    """For the states before all segments of a row and head but the first."""
    count = (call.q.shape[2] - 1) // SEGMENT
    shape = (call.q.shape[0], call.num_states, count, call.k.shape[3] * call.v.shape[3])
    return None if count < 1 else call.q.new_empty(shape, dtype=call.dtype)


def backward(call: Any, returned: Any, run: Any, run_backward: Any) -> Any:
    """The gradients, by run_backward(call, grad_o, grad_S, kept, gradients)."""
    grads = call.new_gradients(returned, state=call.S is not None)
    kept = returned.kept
    if kept is None and (kept := new_kept(call)) is not None:  # an operator of torch.compile stood between
        run(call, call.new_o(), None, kept)
    run_backward(call, returned.grad_o, in_a_row(returned.grad_S, call.dtype), kept, grads)
    return grads


def step(call: Any, run: Any, inplace: bool) -> tuple[Tensor, Tensor]:
    """o and the state behind one token of every row and head, by run(call, o, behind); autograd is told of a state that is
    written in place."""
    before = call.S.contiguous()
    after = before if inplace else torch.empty_like(before)
    o = call.new_o()
    run(call._replace(S=before), o, after)
    if not inplace:
        return o, after
    if before is not call.S:
        call.S.copy_(before)
    increment_version(call.S)
    return o, call.S
