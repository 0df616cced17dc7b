"""The selective scan by the compiled kernels (csrc/scan): forward, backward, one token."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import scan
from tarnn.kernels.cpu.arguments import in_a_row
from tarnn.kernels.selective_scan import Call, Gradients, Outputs

BUNDLE = 64  # channels that a task computes together
# sums over channels are kept apart in so many parts at most, each as large as B and C: a part is a task of a sequence
MOST_PARTS = 16


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return scan.refusal(call)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    """Run the forward kernel: h is None unless `with_state`, `kept` unless `for_backward`."""
    o = call.x.new_empty(call.x.shape)
    behind, kept = call.new_state() if with_state else None, scan.new_kept(call) if for_backward else None
    _run(call, o, behind, kept)
    return Outputs(o, behind, kept)


def backward(call: Call, returned: Any) -> Gradients:
    kept = forward(call, with_state=False).kept if returned.kept is None else returned.kept
    grads, grad_o, wide = call.new_gradients(), returned.grad_o, call.dtype
    (b, t, c), n, rows = call.x.shape, call.A.shape[1], call.num_sequences
    bundles = -(-c // BUNDLE)
    each = -(-bundles // MOST_PARTS)  # bundles of a part
    dt, *_ = given = _given(call)
    of_dt = grads.dt if dt is call.dt else torch.empty_like(dt)
    of_A, of_D = call.x.new_empty(rows, c, n, dtype=wide), call.x.new_empty(rows, c, dtype=wide)
    of_B, of_C = call.x.new_empty(2, b, t, n, dtype=wide)
    parts = call.x.new_empty(-(-bundles // each), 2, b, t, n, dtype=wide)
    torch.ops.tarnn_cpu.selective_scan_backward.default(
        *scan.inputs(call),
        *given,
        kept,
        torch.zeros_like(call.x) if grad_o is None else grad_o,
        in_a_row(returned.grad_h, wide),
        grads.x,
        of_dt,
        of_A,
        of_B,
        of_C,
        of_D,
        grads.h,
        parts,
        each,
    )
    wanted = {"A": of_A.sum(0), "B": of_B, "C": of_C, "D": of_D.sum(0)}
    if of_dt is not grads.dt:
        wanted["dt"] = of_dt
    for name, gradient in wanted.items():
        if getattr(grads, name) is not None:
            getattr(grads, name).copy_(gradient)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return Outputs(*scan.step(call, _run, inplace))


def _run(call: Call, o: Tensor, behind: Tensor | None, kept: Tensor | None = None) -> None:
    torch.ops.tarnn_cpu.selective_scan.default(*scan.inputs(call), *_given(call), o, behind, kept)


def _given(call: Call) -> tuple:
    """dt, A, B, C and D as kernels read them."""
    dt, B, C = (scan.readable(x, call.dtype) for x in (call.dt, call.B, call.C))
    return dt, in_a_row(call.A, call.dtype), B, C, in_a_row(call.D, call.dtype)
