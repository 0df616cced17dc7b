"""Linear attention on GPUs, in Triton: what `eager` computes, with the states on the chip. How: docs/gpu.md.

Nothing here imports Triton before the first call that it computes. A call that it can't compute is refused by a sentence,
and plain PyTorch takes it; so is one whose kernels turn out to be too much for the GPU, when they are first launched.
"""

from typing import Any

import torch

from tarnn.kernels.contract import Mendable, choose
from tarnn.kernels.linear import Call, Gradients, Outputs, Returned
from tarnn.kernels.triton import device, launch_failures
from tarnn.kernels.triton.arguments import FARTHEST, far
from tarnn.kernels.triton.configurations import MAX_WIDTH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_PROGRAMS = 65_535  # along the second and third axis of a CUDA grid


def refusal(call: Call) -> str | None:
    """Why the kernels can't compute this call, or None."""
    if call.q.is_cpu and not device.interpreted:
        return "Triton's kernels are for GPUs, and these tensors are elsewhere."
    if (why := device.refusal(call.q.device)) is not None:
        return why
    if call.q.dtype not in DTYPES:
        return f"The kernels for GPUs take float32, bfloat16 and float16; got {call.q.dtype}."
    if call.values_per_key > 1:
        return "The kernels for GPUs take as many heads of values as of keys; others are for plain PyTorch."
    if call.at_least_one:
        return "The kernels for GPUs divide by denominators as they are, not by 1 at least."
    widths = call.q.shape[3], call.num_features
    if max(widths) > MAX_WIDTH:
        return Mendable(
            f"Attention on the GPU runs in plain PyTorch: the kernels hold heads of at most "
            f"{MAX_WIDTH} channels and features; got {widths}."
        )
    if 0 in (*widths, call.v.shape[3], call.q.shape[0], call.q.shape[1]):
        return "There is nothing for a kernel to do."
    if max(call.q.shape[:2]) > MOST_PROGRAMS:
        return f"The kernels for GPUs take at most {MOST_PROGRAMS:,} rows and heads; got {tuple(call.q.shape[:2])}."
    if any(x is not None and far(x) for x in (call.q, call.k, call.v, call.log_decay)):
        return f"The kernels for GPUs take positions that lie at most {FARTHEST:,} elements apart."
    return launch_failures.refusal(call)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    """The outputs; the denominators are None, and never written, where there will be no backward."""
    from tarnn.kernels.triton import launch, precompile

    try:
        with torch.cuda.device_of(call.q):
            if call.q.is_cuda:
                precompile.compile_forward(call, for_backward)
            return launch.forward(call, for_backward)
    except launch_failures.LaunchError as error:
        return _without(call, error).forward(call, for_backward=for_backward, with_state=with_state)


def backward(call: Call, returned: Returned) -> Gradients:
    from tarnn.kernels.triton import backward_pass, precompile

    try:
        with torch.cuda.device_of(call.q):
            if call.q.is_cuda:
                precompile.compile_backward(call)
            return backward_pass.backward(call, returned)
    except launch_failures.LaunchError as error:
        return _without(call, error).backward(call, returned)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token for every row and head in one launch; autograd is told of tensors that are written in place."""
    from tarnn.kernels.triton import one_token

    try:
        with torch.cuda.device_of(call.q):
            return one_token.step(call, inplace)
    except launch_failures.LaunchError as error:
        return _without(call, error).step(call, inplace=inplace)


def _without(call: Call, error: launch_failures.LaunchError) -> Any:
    """Who computes it instead, from now on: a kernel of this kind of call can't be launched."""
    launch_failures.refuse(call, error)
    return choose("linear", call)
