"""An op as autograd knows it, written once for all ops: what is traced, what is differentiated, and by whom.

Calls that nothing traces go straight to the backend that `tarnn.kernels.contract` chooses, past the op's operator if it has one
(`operators.py`), which costs hundreds of microseconds, forward and backward: more than the arithmetic of a short sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.contract import choose, form, named, of_form, present
from tarnn.kernels.tracing import is_transformed, is_untraced
from tarnn.numerics import full_precision


class Op:
    """A differentiable function of a record: `op(call)`, and `op.step(call)` for one token more.

    Args:
        name: the name of its file in each package of kernels, which has
            forward(call, *, for_backward=True, with_state=True) → outputs, None for those that neither needs;
            backward(call, returned) → gradients; without it, autograd differentiates `forward`;
            step(call, *, inplace=False) → outputs; without it, one token is a call.
        call: the record of a call.
        outputs: the record of its outputs; those without a default are the results of the operator.
        gradients: the record of its gradients, named as the first fields of the call.
        differentiable: which outputs have gradients.
        handed_out: which outputs callers get, those with gradients first; by default these alone.
        keep: (call, outputs, with_state) → the outputs that `backward` needs, None for others; by default those that are no
            results of the operator, which backends make for this.
        returned: the record that `backward` takes: gradients of outputs, kept outputs, and `flags`; by default named after
            the outputs (grad_o, o), with S_behind for an S where the call has an S.
        flags: for a call of booleans, which of its tensors need a gradient, what `returned` ends with.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        outputs: Any,
        gradients: Any,
        differentiable: tuple[str, ...] = ("o",),
        *,
        handed_out: tuple[str, ...] = (),
        keep: Callable[[Any, Any, bool], Any] | None = None,
        returned: Any = None,
        flags: Callable[[Any], tuple] = lambda needs: (),
    ):
        self.name, self.call, self.outputs, self.gradients = name, call, outputs, gradients
        self.eager = named("eager", name)
        self.differentiable, self.handed_out = differentiable, handed_out or differentiable
        self.keep, self.flags = keep or self._keep_private, flags
        self.returned = returned or _returned(call, outputs, differentiable)
        self.nothing = outputs(*[None] * len(outputs._fields))
        self.num_gradients = len(gradients._fields)
        self.forward_op: Any = None  # what torch.compile sees, or None: `operators.py`
        self.backward_op: Any = None

    def __call__(self, call: Any, *, with_state: bool = True) -> Any:
        """The outputs that are handed out; without `with_state` perhaps only the first, and None for others."""
        if is_untraced(call[0]):
            backend = choose(self.name, call)
            if not self.wants_gradient(call):
                return backend.forward(call, for_backward=False, with_state=with_state)
            if not hasattr(backend, "backward"):
                return backend.forward(call)
            results = _EagerAutograd.apply(self, backend, call, with_state, *present(call))
            names = self.handed_out if with_state else self.handed_out[:1]
            return self.nothing._replace(**dict(zip(names, results if with_state else (results,))))
        if is_transformed() or self.forward_op is None or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
            return self.eager.forward(call)
        return self.outputs(*self.forward_op(*call))

    def step(self, call: Any, *, inplace: bool = False) -> Any:
        """One token and the state behind it; in plain operations where they are traced."""
        if not hasattr(self.eager, "step"):
            return self(call)
        if is_untraced(call[0]):
            if not self.wants_gradient(call):
                return choose(self.name, call).step(call, inplace=inplace)
            if not inplace:
                return self(call)  # whose kernels have a backward
        return self.eager.step(call, inplace=inplace)

    def _keep_private(self, call: Any, outputs: Any, with_state: bool) -> Any:
        return self.nothing._replace(**{name: getattr(outputs, name) for name in outputs._field_defaults})

    def wants_gradient(self, call: Any) -> bool:
        """Whether autograd watches something that the outputs depend on."""
        if torch.is_grad_enabled():
            for x in call[: self.num_gradients]:
                if x is not None and x.requires_grad:
                    return True
        return False

    def backward(self, call: Any, returned: Any) -> Sequence[Tensor | None]:
        """The gradients, by the backend for this call."""
        backend = choose(self.name, call)
        if hasattr(backend, "backward"):
            return backend.backward(call, returned)
        return self.of_forward(call, returned[: len(self.differentiable)])

    def of_forward(self, call: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients by eager's forward. By torch.func, which differentiates within operators too, unlike autograd."""
        tensors = dict(zip(self.gradients._fields, call))
        names = [name for name, x in tensors.items() if x is not None]

        def results(*inputs: Tensor) -> tuple[Tensor, ...]:
            outputs = self.eager.forward(call._replace(**dict(zip(names, inputs))))
            return tuple(getattr(outputs, name) for name in self.differentiable)

        with full_precision(call[0]):
            outputs, pull, *_ = torch.func.vjp(results, *(tensors[name] for name in names))
            sent = tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, grads))
            gradients = dict(zip(names, pull(sent)))
        return [gradients.get(name) for name in tensors]

    def differentiated(self, call: Any, grads: Sequence[Tensor | None]) -> tuple[list, list, list]:
        """The gradients of outputs, the call's tensors, and their gradients by autograd through eager's forward, which can be
        differentiated again. The first two are aliases: the graph goes on behind them, so that third derivatives work too."""
        with torch.enable_grad(), full_precision(call[0]):
            sent, inputs = ([_leaf(x) for x in xs] for xs in (grads, call[: self.num_gradients]))
            outputs = self.eager.forward(call._replace(**dict(zip(call._fields, inputs))))
            pairs = [(getattr(outputs, name), g) for name, g in zip(self.differentiable, sent) if g is not None]
            return sent, inputs, grad([y for y, _ in pairs], inputs, [g for _, g in pairs], create_graph=True)

    def records(self, inputs: tuple) -> tuple[Any, Any]:
        """Both records of the inputs of the backward operator."""
        n = len(self.returned._fields)
        return self.returned(*inputs[:n]), self.call(*inputs[n:])


def _returned(call: Any, outputs: Any, differentiable: tuple[str, ...]) -> Any:
    kept = (f"{name}_behind" if name in call._fields else name for name in outputs._fields)
    names = (*(f"grad_{name}" for name in differentiable), *kept)
    return NamedTuple("BackwardInputs", [(name, Tensor | None) for name in names])  # type: ignore[misc]


def _leaf(x: Tensor | None) -> Tensor | None:
    alias = None if x is None else x.view_as(x)
    return alias if alias is None or alias.requires_grad else alias.requires_grad_()


def grad(outputs: list, inputs: list, grads: list, create_graph: bool) -> list[Tensor | None]:
    """torch.autograd.grad, with None for inputs that aren't there or aren't used."""
    there = [x for x in inputs if x is not None]
    gradients: Sequence = [None] * len(there)
    if outputs and there:
        gradients = torch.autograd.grad(outputs, there, grads, create_graph=create_graph, allow_unused=True)
    each = iter(gradients)
    return [None if x is None else next(each) for x in inputs]


# --- what autograd keeps, and what it gets back


def save(ctx, op: Op, call: Any, outputs: Any, with_state: bool) -> None:
    kept = op.keep(call, outputs, with_state)
    ctx.save_for_backward(*present(call), *[x for x in kept if x is not None])
    ctx.form, ctx.kept = form(call), [x is not None for x in kept]


def restored(ctx, op: Op, grads: Sequence[Tensor | None], needs: Any) -> tuple[Any, Any]:
    """The call that was saved, and what comes back to it. needs: the call of booleans."""
    saved = ctx.saved_tensors  # unpacked once: activation checkpointing allows no more
    call, others = of_form(ctx.form, saved)
    each = iter(others)
    kept = [next(each) if there else None for there in ctx.kept]
    if grads[0] is None and kept[0] is not None:
        grads = (torch.zeros_like(kept[0]), *grads[1:])
    return call, op.returned(*grads, *kept, *op.flags(needs))


class _EagerAutograd(torch.autograd.Function):
    """An op for calls that nothing traces, at a tenth of the operator's overhead. It takes the call as one argument, for the
    forward alone, and the tensors in it, which autograd has to see."""

    @staticmethod
    def forward(ctx, op: Op, backend: Any, call: Any, with_state: bool, *tensors: Tensor):
        outputs = backend.forward(call, with_state=with_state)
        save(ctx, op, call, outputs, with_state)
        ctx.op = op
        ctx.set_materialize_grads(False)
        if not with_state:
            return getattr(outputs, op.handed_out[0])
        results = [getattr(outputs, name) for name in op.handed_out]
        ctx.mark_non_differentiable(*results[len(op.differentiable) :])
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        op, needs = ctx.op, ctx.needs_input_grad[4:]
        n = len(op.differentiable)
        grads = grads[:n] if len(grads) >= n else (*grads, *[None] * (n - len(grads)))
        if all(g is None for g in grads):  # not grads.count(None), which compares each number of each tensor
            return (None,) * len(ctx.needs_input_grad)
        call, returned = restored(ctx, op, grads, of_form(ctx.form, needs)[0])
        if not torch.is_grad_enabled():
            gradients = op.backward(call, returned)
        elif op.backward_op is None:  # they are to be differentiated themselves
            gradients = op.differentiated(call, returned[:n])[2]
        else:
            gradients = by_operator(op, call, returned)
        given = [g for g, x in zip(gradients, call) if x is not None]
        return (None, None, None, None, *given, *[None] * (len(needs) - len(given)))


def by_operator(op: Op, call: Any, returned: Any) -> list[Tensor | None]:
    return without_empty(op.backward_op(*returned, *call), call)


def without_empty(gradients: Sequence[Tensor | None], call: Any) -> list[Tensor | None]:
    """None again for what isn't there, or isn't wanted."""
    return [None if g is None or x is None or g.shape != x.shape else g for g, x in zip(gradients, call)]
