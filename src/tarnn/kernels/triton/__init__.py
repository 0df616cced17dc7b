"""Kernels for GPUs, in Triton: not written yet. This package says so to every call, and costs nothing to import."""

from tarnn.kernels.call import Call, Gradients, Outputs, Returned


def refusal(call: Call) -> str | None:
    """Why it can't compute this call: today, always."""
    if not call.q.is_cuda:
        return "Triton's kernels are for GPUs, and these tensors are elsewhere."
    return "The kernels for GPUs are not written yet: attention on a GPU runs in plain PyTorch."


def forward(call: Call, *, for_backward: bool = True) -> Outputs:
    raise NotImplementedError(refusal(call))


def backward(call: Call, returned: Returned) -> Gradients:
    raise NotImplementedError(refusal(call))


def step(call: Call, *, inplace: bool = False) -> Outputs:
    raise NotImplementedError(refusal(call))
