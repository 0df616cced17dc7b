"""A call in three stages: its tensors become what a kernel takes; the kernel; what the kernel gives becomes outputs.

The first and the last are plain PyTorch, which torch.func differentiates within operators too. The kernel is one
`autograd.Function` of flash-linear-attention, and its inputs are leaves here, so autograd differentiates it anywhere.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.numerics import full_precision

Tensors = dict[str, Tensor]
SIDE = 16  # of the smallest tile: the kernels get widths that are a multiple of it
MOST_FADED = -104.0  # e^-104 is 0 in float32, as is everything below; sums of −∞ would be NaN


class Stages(NamedTuple):
    prepare: Callable[[Tensors], Tensors]  # by names of the call's fields → by names of the kernel's arguments
    kernel: Callable[[Tensors], Tensors]  # → "o", and "S" if the state after is wanted
    finish: Callable[[Tensors], Tensors]  # → by names of outputs

    def outputs(self, tensors: Tensors) -> Tensors:
        with torch.no_grad(), full_precision(tensors["q"]):
            return self.finish(self.kernel(self.prepare(tensors)))

    def gradients(self, tensors: Tensors, sent: Tensors) -> Tensors:
        """Compute the gradients of the call's tensors from those of outputs, which are 0 if they are not in `sent`.

        The forward pass is computed again, since the graph of the first one is gone.
        """
        with full_precision(tensors["q"]):
            inputs, pull_inputs, *_ = torch.func.vjp(self.prepare, tensors)
            leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
            with torch.enable_grad():
                results = self.kernel(leaves)
            detached = {name: x.detach() for name, x in results.items()}
            outputs, pull_outputs, *_ = torch.func.vjp(self.finish, detached)
            (of_results,) = pull_outputs({name: sent.get(name, torch.zeros_like(x)) for name, x in outputs.items()})
            pairs = [(x, of_results[name]) for name, x in results.items()]
            of_leaves = torch.autograd.grad(
                [x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs], materialize_grads=True
            )
            return pull_inputs(dict(zip(leaves, of_leaves)))[0]


def gradients_of(call: Any, returned: Any, stages_of: Callable[..., Stages], names: tuple[str, ...]) -> Any:
    """Return the record of a call's gradients. names: the outputs that have gradients."""
    grads = {name: getattr(returned, f"grad_{name}") for name in names}
    sent = {name: x for name, x in grads.items() if x is not None}
    targets = call.new_gradients(returned)
    stages = stages_of(call, with_state=bool(sent.keys() - {"o"}))
    found = stages.gradients(tensors_of(call, targets), sent)
    return targets._make(laid_out(found.get(name), like) for name, like in targets._asdict().items())


def tensors_of(call: Any, gradients: Any) -> Tensors:
    """Return the tensors of a call that have gradients, by name. gradients: their record, or its class."""
    return {name: x for name in gradients._fields if (x := getattr(call, name)) is not None}


def laid_out(x: Tensor | None, like: Tensor | None) -> Any:
    """Return x in the dtype and memory layout of `like`, which it is copied into if it has others."""
    if x is None or like is None:
        return None
    return x if x.dtype == like.dtype and x.stride() == like.stride() else like.copy_(x)


# --- what both ops' tensors go through


def in_time(x: Tensor) -> Tensor:
    """Return (b, h, t, …) as (b, t, h, …), and back."""
    return x.transpose(1, 2)


def padded(x: Tensor, axes: int = 1) -> Tensor:
    """Return x with zeros after each of its last axes, so that their lengths are multiples of 16."""
    more = [-n % SIDE for n in x.shape[::-1][:axes]]
    return pad(x, [n for extra in more for n in (0, extra)]) if any(more) else x


def faded(call: Any, masked: Tensor | None) -> Tensor:
    """Return the log-decays of a call as kernels can sum them, 0 at masked tokens."""
    decay = without(call.log_decay.to(call.dtype).clamp(min=MOST_FADED), masked)
    return padded(decay) if call.has_channels else decay


def results(kernel: Callable, call: Any, inputs: Tensors, scale: float, with_state: bool) -> Tensors:
    """Call a kernel; "S", the state after, is there `with_state`."""
    packed = {} if call.cu_seqlens is None else {"cu_seqlens": call.cu_seqlens.long()}
    o, S = kernel(**inputs, **packed, scale=scale, output_final_state=with_state)
    return {"o": o, "S": S} if with_state else {"o": o}


def without(x: Tensor, masked: Tensor | None) -> Tensor:
    """Return x (b, h, t, …) with zeros at masked tokens (b, 1, t)."""
    return x if masked is None else x.masked_fill(masked.view(*masked.shape, *[1] * (x.ndim - 3)), 0.0)
