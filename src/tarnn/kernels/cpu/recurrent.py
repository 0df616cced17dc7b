"""The passes of recurrences around their compiled kernels: what forward keeps for backward, and where a state is written.

`run(call, o, state, kept)` stands for a forward kernel, which writes the last three unless they are None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu import arguments

DELTA_SEGMENT = (
    256  # tokens: forward of a delta rule keeps the state before each; backward has room for states within one
)
KEPT_EVERY = 64  # tokens: forward of a scan keeps the state before each such segment but the first

Run = Callable[..., None]


def forward(call: Any, run: Run, kept: Tensor | None, with_state: bool) -> Any:
    """Return the outputs of a call; the state is None unless `with_state`."""
    outputs = call.new_outputs(state=with_state)
    run(call, *outputs[:2], kept)
    return outputs._replace(kept=kept)


def step(call: Any, run: Run, inplace: bool) -> Any:
    """Return the outputs of one token. A state that is written in place gets a new version, so that autograd knows."""
    name, o = call.per_sequence[0], call.new_o()
    given = getattr(call, name)
    before = None if given is None else given.contiguous()
    after = before if inplace else call.new_state()
    run(call if before is given else call._replace(**{name: before}), o, after)
    if not inplace:
        return call.outputs(o, after)
    if before is not given:
        given.copy_(before)
    increment_version(given)
    return call.outputs(o, given)


# --- delta rules


def new_kept(call: Any) -> Tensor | None:
    """Return room for the states before all segments of a row and head but the first."""
    count = (call.q.shape[2] - 1) // DELTA_SEGMENT
    shape = (call.q.shape[0], call.num_states, count, call.k.shape[3] * call.v.shape[3])
    return None if count < 1 else call.q.new_empty(shape, dtype=call.dtype)


def backward(call: Any, returned: Any, run: Run, kernel: Any, inputs: tuple) -> Any:
    """Return the gradients of a delta rule by its kernel, (grad_o, grad_S, kept, *inputs, *gradients)."""
    grads, kept = call.new_gradients(), returned.kept
    if kept is None and (kept := new_kept(call)) is not None:  # an operator of torch.compile stood between
        run(call, call.new_o(), None, kept)
    kernel(returned.grad_o, arguments.in_a_row(returned.grad_S, call.dtype), kept, *inputs, *grads)
    return grads


# --- scans


def scan_refusal(call: Any) -> str | None:
    """Why the compiled kernels can't compute this scan, or None."""
    if call.x.numel() == 0 or 0 in call.state_shape:
        return "Tensors without numbers are left to plain PyTorch."
    return arguments.refusal(call.x)


def new_scan_kept(call: Any) -> Tensor:
    """Return room for the states before all segments but the first, sequence after sequence."""
    cuts = call.cuts()
    lengths = [call.x.shape[1]] * call.x.shape[0] if cuts is None else [b - a for a, b in zip(cuts, cuts[1:])]
    count = sum(max(0, length - 1) // KEPT_EVERY for length in lengths)
    return call.x.new_empty(count, *call.state_shape[1:], dtype=call.dtype)


def scan_inputs(call: Any) -> tuple:
    """Return the first arguments of both scans' kernels."""
    before = None if call.h is None else call.h.contiguous()
    key_mask = None if call.key_mask is None else call.key_mask.contiguous()
    return call.x, before, key_mask, arguments.bounds(call), KEPT_EVERY


def scan_gradients(call: Any, returned: Any, run: Run) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what a scan kept, computed again if it didn't, and the gradients of o and h as kernels read them."""
    kept = returned.kept
    if kept is None:
        kept = new_scan_kept(call)
        run(call, call.new_o(), None, kept)
    grad_o = torch.zeros_like(call.x) if returned.grad_o is None else returned.grad_o
    return kept, grad_o, arguments.in_a_row(returned.grad_h, call.dtype)


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a type that kernels read where sums are of this one: itself, but for float64 among float32 and the contrary."""
    sixteen_bits = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    return x if x.dtype == dtype or sixteen_bits else x.to(dtype)
