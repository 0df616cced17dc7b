"""An op as torch.compile knows it: schema, shapes without data, first and second derivative, written once for all ops.

An operator (a digest of its schema follows in its name) is opaque to torch.compile, which sees only its schema and fake kernel;
inside, the backend that `tarnn.kernels.contract` chooses does the work.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.kernels.contract import choose, num_tensors, schema
from tarnn.numerics import full_precision
from tarnn.ops.registration import Op, by_operator, grad, restored, save, without_empty


def with_digest(name: str, of_schema: str) -> str:
    """The name of an operator. torch.compile's caches on disk know operators by name alone: without a digest in it, graphs that
    were compiled for another schema, by another version of the library, would be called."""
    return f"tarnn::{name}_{zlib.crc32(of_schema.encode()):08x}"


def with_operator(op: Op, name: str) -> Op:
    """The op with operators of its forward and backward passes: torch.compile sees these, not eager's plain operations.

    A call of it has `new_outputs()`, tensors like those that `forward` gives, and if its backends have a `backward`,
    `new_gradients(returned)`.
    """
    required = len(op.outputs._fields) - len(op.outputs._field_defaults)  # shapes of the others are a backend's own

    def forward(*inputs):
        call = op.call(*inputs)
        return tuple(choose(op.name, call).forward(call)[:required])

    def backward(*inputs):
        returned, call = op.records(inputs)
        gradients = op.backward(call, returned)
        if hasattr(call, "new_gradients") and hasattr(choose(op.name, call), "backward"):
            return _of_operator(gradients, call)
        fresh = new_gradients(*inputs)  # for others may be views of what was given
        return tuple(x if g is None else x.copy_(g) for g, x in zip(gradients, fresh))

    def new_gradients(*inputs):
        returned, call = op.records(inputs)
        if hasattr(call, "new_gradients"):
            return _of_operator(call.new_gradients(returned), call)
        inputs = call[: op.num_gradients]
        return _of_operator([x if x is None else x.new_empty(x.shape) for x in inputs], call)

    def keep(ctx, inputs, output):
        save(ctx, op, op.call(*inputs), op.outputs(*output), True)

    def differentiate(ctx, *grads):
        sent = [grads[op.outputs._fields.index(name)] for name in op.differentiable]
        gradients = by_operator(op, *restored(ctx, op, sent, op.call(*ctx.needs_input_grad)))
        return _for_inputs(gradients, op.call)

    def save_again(ctx, inputs, output):
        returned, call = op.records(inputs)
        ctx.save_for_backward(*returned[: len(op.differentiable)], *call[: num_tensors(op.call)])
        ctx.constants = call[num_tensors(op.call) :]

    def differentiate_again(ctx, *grads):
        return _second(op, ctx, grads)

    operators = []
    for suffix, run, fake, setup, derivative, (records, results) in (
        ("", forward, lambda *x: op.call(*x).new_outputs()[:required], keep, differentiate, ((op.call,), op.outputs)),
        ("_backward", backward, new_gradients, save_again, differentiate_again, ((op.returned, op.call), op.gradients)),
    ):
        its_schema = schema(*records, results=results)
        operator = torch.library.custom_op(
            with_digest(name + suffix, its_schema), run, mutates_args=(), schema=its_schema, tags=_NOT_RECORDED
        )
        operator.register_fake(fake)
        operator.register_autograd(derivative, setup_context=setup)
        operators.append(operator)
    op.forward_op, op.backward_op = operators
    return op


# by torch.compile in CUDA graphs: a backend keeps tables on the device between calls, and reads cu_seqlens
_NOT_RECORDED = (torch.Tag.cudagraph_unsafe,)


def _of_operator(gradients: Sequence[Tensor | None], call: Any) -> tuple[Tensor, ...]:
    """Return the gradients of inputs that the call has; empty tensors for others, since an operator cannot return None."""
    pairs = zip(gradients, call)
    return tuple(call[0].new_empty(0) if x is None or g is None else g.to(x.dtype) for g, x in pairs)


def _for_inputs(gradients: Sequence, record: Any) -> tuple:
    """Gradients of a record's first fields, and None for the others."""
    return (*gradients, *[None] * (len(record._fields) - len(gradients)))


def _second(op: Op, ctx, of_gradients: Sequence[Tensor | None]) -> tuple:
    """The second derivative, by autograd through the differentiable forward, twice. Kept outputs need no gradient of their
    own."""
    saved, n = ctx.saved_tensors, len(op.differentiable)  # unpacked once, as above
    call = op.call(*saved[n:], *ctx.constants)
    with torch.enable_grad(), full_precision(call[0]):
        sent, inputs, first = op.differentiated(call, saved[:n])
        pairs = zip(first, without_empty(of_gradients, call))
        used = [(a, b) for a, b in pairs if a is not None and b is not None and a.requires_grad]
        again = torch.is_grad_enabled() and any(b.requires_grad for _, b in used)
        second = grad([a for a, _ in used], [*sent, *inputs], [b for _, b in used], create_graph=again)
    return (*_for_inputs(second[:n], op.returned), *_for_inputs(second[n:], op.call))
