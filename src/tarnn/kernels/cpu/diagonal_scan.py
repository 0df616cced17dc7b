"""The diagonal scan by the compiled kernels (csrc/scan): forward, backward, one token."""

from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.cpu import recurrent
from tarnn.kernels.cpu.recurrent import scan_refusal as refusal
from tarnn.kernels.diagonal_scan import Call, Gradients, Outputs

__all__ = ["backward", "forward", "refusal", "step"]


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    return recurrent.forward(call, _run, recurrent.new_scan_kept(call) if for_backward else None, with_state)


def backward(call: Call, returned: Any) -> Gradients:
    grads, log_decay = call.new_gradients(), recurrent.readable(call.log_decay, call.dtype)
    of_decay = grads.log_decay if log_decay is call.log_decay else torch.empty_like(log_decay)
    sent = recurrent.scan_gradients(call, returned, _run)
    inputs, written = (*recurrent.scan_inputs(call), log_decay), (grads.x, of_decay, grads.h)
    torch.ops.tarnn_cpu.diagonal_scan_backward.default(*inputs, *sent, *written)
    if of_decay is not grads.log_decay:
        grads.log_decay.copy_(of_decay)
    return grads


def step(call: Call, *, inplace: bool = False) -> Outputs:
    return recurrent.step(call, _run, inplace)


def _run(call: Call, o: Tensor, after: Tensor | None, kept: Tensor | None = None) -> None:
    log_decay = recurrent.readable(call.log_decay, call.dtype)
    torch.ops.tarnn_cpu.diagonal_scan.default(*recurrent.scan_inputs(call), log_decay, o, after, kept)
