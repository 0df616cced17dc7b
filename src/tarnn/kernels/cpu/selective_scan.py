"""The selective scan by the compiled kernels (csrc/scan): forward, backward, one token."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import recurrent
from tarnn.kernels.cpu.arguments import in_a_row
from tarnn.kernels.cpu.recurrent import scan_refusal as refusal
from tarnn.kernels.selective_scan import Call, Gradients, Outputs

__all__ = ["backward", "forward", "refusal", "step"]

BUNDLE = 64  # channels that a task computes together
# sums over channels are kept apart in so many parts at most, each as large as B and C: a part is a task of a sequence
MOST_PARTS = 16


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrent.forward(call, _run, recurrent.new_scan_kept(call) if for_backward else None, with_state)


def backward(call: Call, returned: Any) -> Gradients:
    grads, wide = call.new_gradients(), call.dtype
    (b, t, c), n, rows = call.x.shape, call.A.shape[1], call.num_sequences
    bundles = -(-c // BUNDLE)
    each = -(-bundles // MOST_PARTS)  # bundles of a part
    dt, *_ = parameters = _parameters(call)
    of_dt = grads.dt if dt is call.dt else torch.empty_like(dt)
    of_A, of_D = call.x.new_empty(rows, c, n, dtype=wide), call.x.new_empty(rows, c, dtype=wide)
    of_B, of_C = call.x.new_empty(2, b, t, n, dtype=wide)
    parts = call.x.new_empty(-(-bundles // each), 2, b, t, n, dtype=wide)
    sent = recurrent.scan_gradients(call, returned, _run)
    written = (grads.x, of_dt, of_A, of_B, of_C, of_D, grads.h)
    inputs = (*recurrent.scan_inputs(call), *parameters)
    torch.ops.tarnn_cpu.selective_scan_backward.default(*inputs, *sent, *written, parts, each)
    sums = {"A": of_A.sum(0), "B": of_B, "C": of_C, "D": of_D.sum(0)}
    if of_dt is not grads.dt:
        sums["dt"] = of_dt
    for name, gradient in sums.items():
        if getattr(grads, name) is not None:
            getattr(grads, name).copy_(gradient)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrent.step(call, _run, inplace)


def _run(call: Call, o: Tensor, after: Tensor | None, kept: Tensor | None = None) -> None:
    torch.ops.tarnn_cpu.selective_scan.default(*recurrent.scan_inputs(call), *_parameters(call), o, after, kept)


def _parameters(call: Call) -> tuple:
    """dt, A, B, C and D as kernels read them."""
    dt, B, C = (recurrent.readable(x, call.dtype) for x in (call.dt, call.B, call.C))
    return dt, in_a_row(call.A, call.dtype), B, C, in_a_row(call.D, call.dtype)
