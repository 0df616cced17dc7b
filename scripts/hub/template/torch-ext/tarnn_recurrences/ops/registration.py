"""An op as autograd knows it, computed by the compiled kernels or refused."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Op:
    """A differentiable function of a record: `op(call)`, and `op.step(call)` for one token more.

    name: of its file in kernels/cpu/. call, outputs, gradients: records. differentiable: both outputs, o and the state.
    """

    def __init__(self, name: str, call: Any, outputs: Any, gradients: Any, differentiable: tuple[str, str]):
        self.kernels = importlib.import_module(f"...kernels.cpu.{name}", __name__)
        self.outputs, self.inputs, self.state = outputs, gradients._fields, differentiable[1]

    @torch.compiler.disable
    def __call__(self, call: Any, *, with_state: bool = True) -> Any:
        """Return the outputs; ValueError for a call that the kernels don't compute."""
        self._check(call)
        if not self._wants_gradient(call):
            return self.kernels.forward(call, for_backward=False, with_state=with_state)
        names = [name for name, x in zip(call._fields, call) if isinstance(x, Tensor)]
        constants = call._replace(**dict.fromkeys(names))
        o, state = _Pass.apply(self, constants, names, *(getattr(call, name) for name in names))
        return self.outputs(o, state)

    @torch.compiler.disable
    def step(self, call: Any, *, inplace: bool = False) -> Any:
        self._check(call)
        return self(call) if self._wants_gradient(call) and not inplace else self.kernels.step(call, inplace=inplace)

    def _check(self, call: Any) -> None:
        reason = self.kernels.refusal(call)
        if reason is not None:
            raise ValueError(reason)

    def _wants_gradient(self, call: Any) -> bool:
        inputs = (getattr(call, name) for name in self.inputs)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class _Pass(torch.autograd.Function):
    """The kernels' forward and backward. Tensors are given one by one, so that autograd sees them."""

    @staticmethod
    def forward(ctx, op: Op, constants: Any, names: list[str], *tensors: Tensor):
        call = constants._replace(**dict(zip(names, tensors)))
        outputs = op.kernels.forward(call)
        kept = getattr(outputs, "kept", None)
        ctx.save_for_backward(*tensors, kept)
        ctx.op, ctx.constants, ctx.names = op, constants, names
        ctx.set_materialize_grads(False)
        return outputs[0], outputs[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_o, grad_state):
        *tensors, kept = ctx.saved_tensors
        call = ctx.constants._replace(**dict(zip(ctx.names, tensors)))
        returned = SimpleNamespace(grad_o=grad_o, kept=kept, **{f"grad_{ctx.op.state}": grad_state})
        gradients = ctx.op.kernels.backward(call, returned)
        return None, None, None, *(getattr(gradients, name, None) for name in ctx.names)
