"""The diagonal scan by the compiled kernels (csrc/scan): forward, backward, one token."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import scan
from tarnn.kernels.cpu.arguments import in_a_row
from tarnn.kernels.diagonal_scan import Call, Gradients, Outputs


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
    grads, grad_o = call.new_gradients(), returned.grad_o
    log_decay = scan.readable(call.log_decay, call.dtype)
    of_decay = grads.log_decay if log_decay is call.log_decay else torch.empty_like(log_decay)
    torch.ops.tarnn_cpu.diagonal_scan_backward.default(
        *scan.inputs(call),
        log_decay,
        kept,
        torch.zeros_like(call.x) if grad_o is None else grad_o,
        in_a_row(returned.grad_h, call.dtype),
        grads.x,
        of_decay,
        grads.h,
    )
    if of_decay is not grads.log_decay:
        grads.log_decay.copy_(of_decay)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return Outputs(*scan.step(call, _run, inplace))


def _run(call: Call, o: Tensor, behind: Tensor | None, kept: Tensor | None = None) -> None:
    log_decay = scan.readable(call.log_decay, call.dtype)
    torch.ops.tarnn_cpu.diagonal_scan.default(*scan.inputs(call), log_decay, o, behind, kept)
