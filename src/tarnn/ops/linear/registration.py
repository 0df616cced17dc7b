"""Linear attention as a torch operator: schema, shapes without data, first and second derivative.

`tarnn::linear_attention` (a digest of its schema follows in the name) is opaque to torch.compile, which sees only its schema
and fake kernel; inside, the backend that `tarnn.kernels.backends` chooses does the work. Calls that nothing traces go past
the operator, which costs hundreds of microseconds, forward and backward: more than the arithmetic of a short sequence.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.kernels import eager
from tarnn.kernels.backends import choose
from tarnn.kernels.call import Call, Gradients, Outputs, Returned, returned_call, schema
from tarnn.kernels.plain import is_plain, is_transformed
from tarnn.numerics import full_precision


def attend(call: Call, *, with_state: bool = True) -> Outputs:
    """The outputs of a call, differentiable twice. Denominators may be None, and a state that nobody wants."""
    if is_plain(call.q):
        if not _wants_gradient(call):
            return choose(call).forward(call, for_backward=False, with_state=with_state)
        found = _Attention.apply(call, with_state, *call.given)
        o, *state = found if with_state else (found, None, None, None)
        return Outputs(o, None, *state)
    if is_transformed():
        return eager.forward(call)
    return Outputs(*linear_attention_op(*call))


def take_step(call: Call, *, inplace: bool) -> Outputs:
    """One token and the state behind it, M None where nothing has a log-weight; in plain operations where they are traced."""
    if is_plain(call.q):
        if not _wants_gradient(call):
            return choose(call).step(call, inplace=inplace)
        if not inplace:
            outputs = attend(call)  # whose kernels have a backward
            return outputs if call.weighted else outputs._replace(M=None)
    return eager.step(call, inplace=inplace)


def _wants_gradient(call: Call) -> bool:
    if not torch.is_grad_enabled():
        return False
    q, k, v, *others = call.differentiable
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in others)


# --- the operators


def _with_digest(name: str, of_schema: str) -> str:
    """The name of an operator. torch.compile's caches on disk know operators by name alone: without a digest in it, graphs that
    were compiled for another schema, by another version of the library, would be called."""
    return f"tarnn::{name}_{zlib.crc32(of_schema.encode()):08x}"


_FORWARD = schema(Call, results=Outputs)
_BACKWARD = schema(Returned, Call, results=Gradients)
# by torch.compile in CUDA graphs: a backend keeps tables on the device between calls, and reads cu_seqlens
_NOT_RECORDED = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op(
    _with_digest("linear_attention", _FORWARD), mutates_args=(), schema=_FORWARD, tags=_NOT_RECORDED
)
def linear_attention_op(*inputs):
    call = Call(*inputs)
    outputs = choose(call).forward(call)
    if call.side_by_side:  # as the fake kernel says; a copy only of what the plain backend made
        outputs = outputs._replace(o=outputs.o.transpose(1, 2).contiguous().transpose(1, 2))
    return outputs[:-1]  # without `kept`, whose shape is the backend's own: backward makes it again


@linear_attention_op.register_fake
def _(*inputs):
    return Call(*inputs).new_outputs()[:-1]


@torch.library.custom_op(
    _with_digest("linear_attention_backward", _BACKWARD), mutates_args=(), schema=_BACKWARD, tags=_NOT_RECORDED
)
def backward_op(*inputs):
    returned, call = returned_call(inputs)
    return _of_operator(choose(call).backward(call, returned), call)


@backward_op.register_fake
def _(*inputs):
    returned, call = returned_call(inputs)
    return _of_operator(call.new_gradients(returned.wants_projection).of(call), call)


def _of_operator(grads: Gradients, call: Call) -> tuple[Tensor, ...]:
    """Those of what the call has; empty tensors for None, which an operator cannot return."""
    return tuple(call.q.new_empty(0) if x is None else x for x in grads.wanted(call))


# --- first derivative


def _save_for_backward(ctx, inputs, output):
    _save(ctx, Call(*inputs), output, handed_out=True)


def _save(ctx, call: Call, outputs, *, handed_out: bool) -> None:
    """Inputs, o and den; where causal, what the backend keeps; else the state that all queries read: a copy of one that is
    handed out, which may be written to."""
    o, den, S, z, M, kept = Outputs(*outputs)
    behind = [kept] if call.causal else [x.clone() for x in (S, z, M)] if handed_out else [S, z, M]
    ctx.save_for_backward(*call.given, o, den, *behind)
    ctx.form = call.form


def _backward(ctx, grad_o, _, grad_S, grad_z, __):
    """A gradient, or None, for each input of the operator."""
    wants_projection = _wants_projection(Call(*ctx.needs_input_grad))
    call, grads = _gradients(ctx, grad_o, grad_S, grad_z, wants_projection, _by_operator)
    return _for_inputs(grads.wanted(call), Call)


def _wants_projection(needs: Call) -> bool:
    """Whether the gradients of Ω and β are wanted, for a call of booleans."""
    return bool(needs.omega or needs.bias)


def _gradients(ctx, grad_o, grad_S, grad_z, wants_projection: bool, by: Callable) -> tuple[Call, Gradients]:
    """The call that was saved, and its gradients by a backend's backward or by the operator."""
    saved: tuple[Any, ...] = ctx.saved_tensors  # unpacked once: activation checkpointing allows no more
    call, (o, den, *behind) = Call.of_form(ctx.form, saved)
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    (S, z, M), kept = ((None, None, None), behind[0]) if call.causal else (behind, None)
    return call, by(call, Returned(grad_o, grad_S, grad_z, o, den, S, z, M, wants_projection, kept))


def _by_operator(call: Call, returned: Returned) -> Gradients:
    grads = Gradients(*backward_op(*returned, *call))
    return grads if returned.wants_projection else grads._replace(omega=None, bias=None)


def _by_backend(call: Call, returned: Returned) -> Gradients:
    return choose(call).backward(call, returned)


def _for_inputs(grads: Sequence, record: Any) -> tuple:
    """Gradients of a record's first fields, and None for the others."""
    return (*grads, *[None] * (len(record._fields) - len(grads)))


linear_attention_op.register_autograd(_backward, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    """The same, for calls that nothing traces: a tenth of the operator's overhead. It takes the call as one argument, for the
    forward alone, and the tensors in it, which autograd has to see."""

    @staticmethod
    def forward(ctx, call: Call, with_state: bool, *given: Tensor):
        outputs = choose(call).forward(call, with_state=with_state)
        _save(ctx, call, outputs, handed_out=with_state)
        ctx.set_materialize_grads(False)
        if not with_state:
            return outputs.o
        ctx.mark_non_differentiable(outputs.M)
        return outputs.o, outputs.S, outputs.z, outputs.M

    @staticmethod
    def backward(ctx, grad_o, grad_S=None, grad_z=None, _=None):
        form, needs = ctx.form, ctx.needs_input_grad[2:]
        wants_projection = bool(form.omega) and _wants_projection(Call.of_form(form, needs)[0])
        again = torch.is_grad_enabled()  # it is to be differentiated itself
        by = _by_operator if again else _by_backend
        call, grads = _gradients(ctx, grad_o, grad_S, grad_z, wants_projection, by)
        given = [g for g, x in zip(grads, call) if x is not None]
        return (None, None, *given, *[None] * (len(needs) - len(given)))


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


backward_op.register_autograd(_double_backward, setup_context=_save_for_double_backward)
