"""Linear attention as a torch operator: schema, shapes without data, first and second derivative.

`tarnn::linear_attention` is opaque to torch.compile, which sees only its schema and fake kernel; inside, the backend
that `tarnn.kernels.backends` chooses does the work. Calls that nothing traces go past the operator, which costs hundreds
of microseconds, forward and backward: more than the arithmetic of a short sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tarnn.kernels import eager
from tarnn.kernels.backends import choose
from tarnn.kernels.call import Call, Gradients, Outputs, Returned, returned_call, schema
from tarnn.numerics import full_precision

_PLAIN = (Tensor, nn.Parameter)


def attend(call: Call) -> Outputs:
    """The outputs of a call, differentiable twice. Denominators may be None."""
    if _is_plain(call):
        if _wants_gradient(call):
            return Outputs(*_Attention.apply(*call))
        return choose(call).forward(call, for_backward=False)
    if torch._C._are_functorch_transforms_active():
        return eager.forward(call)  # torch.func sees through plain operations only
    return Outputs(*linear_attention_op(*call))


def take_step(call: Call, *, inplace: bool) -> Outputs:
    """One token and the state behind it; in plain operations where they are differentiated or traced."""
    if _is_plain(call) and not _wants_gradient(call):
        return choose(call).step(call, inplace=inplace)
    return eager.step(call, inplace=inplace)


def _is_plain(call: Call) -> bool:
    """Whether this is a call on real tensors: nothing traces it, and no torch.func is around."""
    if torch.compiler.is_compiling() or type(call.q) not in _PLAIN:
        return False
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def _wants_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call.differentiable)


# --- the operators


@torch.library.custom_op("tarnn::linear_attention", mutates_args=(), schema=schema(Call, results=Outputs))
def linear_attention_op(*inputs):
    call = Call(*inputs)
    return tuple(choose(call).forward(call))


@linear_attention_op.register_fake
def _(*inputs):
    return tuple(Call(*inputs).new_outputs())


@torch.library.custom_op(
    "tarnn::linear_attention_backward", mutates_args=(), schema=schema(Returned, Call, results=Gradients)
)
def backward_op(*inputs):
    returned, call = returned_call(inputs)
    return _without_none(choose(call).backward(call, returned), call)


@backward_op.register_fake
def _(*inputs):
    returned, call = returned_call(inputs)
    return _without_none(call.new_gradients(returned.wants_projection).of(call), call)


def _without_none(grads: Gradients, call: Call) -> tuple[Tensor, ...]:
    """Empty tensors for None, which an operator cannot return."""
    return tuple(call.q.new_empty(0) if x is None else x for x in grads)


# --- first derivative


def _save_for_backward(ctx, inputs, output):
    """Inputs, o and den; where not causal, copies of the state that all queries read: the one handed out may be written to."""
    call, (o, den, *behind) = Call(*inputs), output
    ctx.save_for_backward(
        *call.tensors, o, den, *([None] * 3 if call.causal else [x.clone() for x in behind])
    )
    ctx.constants, ctx.num_tensors = call.constants, len(call.tensors)


def _backward(ctx, grad_o, _, grad_S, grad_z, __, by: Callable | None = None):
    """A gradient, or None, for each input of the forward. `by`: a backend's backward; else the operator."""
    saved: tuple[Any, ...] = ctx.saved_tensors  # unpacked once: activation checkpointing allows no more
    call, outputs = Call(*saved[: ctx.num_tensors], *ctx.constants), saved[ctx.num_tensors :]
    needs = Call(*ctx.needs_input_grad)
    wants_projection = call.omega is not None and bool(needs.omega or needs.bias)
    grad_o = torch.zeros_like(outputs[0]) if grad_o is None else grad_o
    o, den, S, z, M = outputs
    returned = Returned(grad_o, grad_S, grad_z, o, den, S, z, M, wants_projection)
    grads = (by or _by_operator)(call, returned)
    return _for_inputs(grads.wanted(call), Call)


def _by_operator(call: Call, returned: Returned) -> Gradients:
    grads = Gradients(*torch.ops.tarnn.linear_attention_backward(*returned, *call))
    return grads if returned.wants_projection else grads._replace(omega=None, bias=None)


def _by_backend(call: Call, returned: Returned) -> Gradients:
    return choose(call).backward(call, returned)


def _for_inputs(grads: Sequence, record: Any) -> tuple:
    """Gradients of a record's first fields, and None for the others."""
    return (*grads, *[None] * (len(record._fields) - len(grads)))


torch.library.register_autograd("tarnn::linear_attention", _backward, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    """The same, for calls that nothing traces: a tenth of the operator's overhead."""

    @staticmethod
    def forward(ctx, *inputs):
        call = Call(*inputs)
        outputs = choose(call).forward(call)
        _save_for_backward(ctx, inputs, outputs)
        ctx.mark_non_differentiable(outputs.den, outputs.M)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        again = torch.is_grad_enabled()  # it is to be differentiated itself
        return _backward(ctx, *grads, by=_by_operator if again else _by_backend)


# --- second derivative


def _save_for_double_backward(ctx, inputs, output):
    returned, call = returned_call(inputs)
    ctx.save_for_backward(returned.grad_o, returned.grad_S, returned.grad_z, *call.tensors)
    ctx.constants, ctx.wants_projection = call.constants, returned.wants_projection


def _double_backward(ctx, *grads_of_grads):
    """Autograd through the differentiable forward, twice; its outputs, o and others, need no gradient of their own."""
    saved = ctx.saved_tensors  # unpacked once, as above
    cotangents, call = saved[:3], Call(*saved[3:], *ctx.constants)
    with torch.enable_grad(), full_precision(call.q):
        # aliases: the graph goes on behind them, so that third derivatives work too
        sent, given = ([_leaf(x) for x in xs] for xs in (cotangents, call.differentiable))
        outputs = eager.forward(call._replace(**dict(zip(Gradients._fields, given))))
        pairs = [(y, g) for y, g in zip((outputs.o, outputs.S, outputs.z), sent) if g is not None]
        first = _grad([y for y, _ in pairs], given, [g for _, g in pairs], create_graph=True)
        gg = Gradients(*grads_of_grads)
        gg = (gg if ctx.wants_projection else gg._replace(omega=None, bias=None)).wanted(call)
        used = [(a, b) for a, b in zip(first, gg) if a is not None and b is not None and a.requires_grad]
        again = torch.is_grad_enabled() and any(b.requires_grad for _, b in used)
        second = _grad([a for a, _ in used], [*sent, *given], [b for _, b in used], create_graph=again)
    return (*_for_inputs(second[: len(sent)], Returned), *_for_inputs(second[len(sent) :], Call))


def _leaf(x: Tensor | None) -> Tensor | None:
    alias = None if x is None else x.view_as(x)
    return alias if alias is None or alias.requires_grad else alias.requires_grad_()


def _grad(outputs: list, inputs: list, grads: list, create_graph: bool) -> list[Tensor | None]:
    """torch.autograd.grad, with None for inputs that aren't there or aren't used."""
    there = [x for x in inputs if x is not None]
    found: Sequence = [None] * len(there)
    if outputs and there:
        found = torch.autograd.grad(outputs, there, grads, create_graph=create_graph, allow_unused=True)
    each = iter(found)
    return [None if x is None else next(each) for x in inputs]


torch.library.register_autograd(
    "tarnn::linear_attention_backward", _double_backward, setup_context=_save_for_double_backward
)
