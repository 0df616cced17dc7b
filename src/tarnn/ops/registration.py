"""Linear attention as a torch operator: schema, shapes without data, first and second derivative.

`tarnn::linear_attention` is opaque to torch.compile, which sees only its schema and fake kernel; inside, a
backend from `tarnn.kernels` does the work: the compiled one where it serves, else plain PyTorch, which takes packed
sequences in groups of similar length. The second derivative is autograd through the latter's differentiable forward.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tarnn.kernels import cpu, eager
from tarnn.kernels.eager import Call, Gradients
from tarnn.numerics import full_precision, wide
from tarnn.ops import packing

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? key_log_weight, Tensor? S, Tensor? z, Tensor? omega, "
    "Tensor? bias, Tensor? M, Tensor? key_mask, Tensor? cu_seqlens, str feature_map, bool causal, bool normalize, "
    "float eps, float factor, float square, float offset, float shift"
)
_TENSORS, _OPTIONS = 12, 8
_DIFFERENTIABLE = 9  # the first nine inputs: q, k, v, log_decay, key_log_weight, S, z, omega, bias
_BEFORE = 9  # inputs of the backward before those of the forward
_CONSTANT = _TENSORS - _DIFFERENTIABLE + _OPTIONS


def _call(q, k, v, log_decay, key_log_weight, S, z, omega, bias, M, key_mask, cu_seqlens, *options) -> Call:
    feature_map, causal, normalize, eps, *numbers = options
    how = (feature_map, causal, normalize, eps, key_mask, log_decay, key_log_weight, S, z, M, omega, bias)
    return Call(q, k, v, *how, *numbers)


def forward(*inputs):
    """In plain PyTorch: autograd and torch.func see through it."""
    call, cu_seqlens = _call(*inputs), inputs[_TENSORS - 1]
    with full_precision(call.q):
        return eager.forward(call) if cu_seqlens is None else _packed_forward(call, cu_seqlens)


def native(*inputs, for_backward=False):
    """By the compiled kernels, where `cpu.serves(q)`; the denominators are None unless they are for backward."""
    call = _call(*inputs)
    return cpu.forward(call, _cuts(call, inputs[_TENSORS - 1]), for_backward=for_backward)


def _cuts(call: Call, cu_seqlens: Tensor | None) -> list[int] | None:
    return None if cu_seqlens is None else packing.bounds(cu_seqlens, call.q.shape[2])


@torch.library.custom_op(
    "tarnn::linear_attention",
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor o, Tensor den, Tensor S, Tensor z, Tensor M)",
)
def linear_attention_op(*inputs):
    return native(*inputs, for_backward=True) if cpu.serves(inputs[0]) else forward(*inputs)


@linear_attention_op.register_fake
def _(*inputs):
    call, cu_seqlens = _call(*inputs), inputs[_TENSORS - 1]
    q, k, v, f = call.q, call.k, call.v, call.num_features
    b = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    g, e = k.shape[1], v.shape[3]
    dtype = wide(q.dtype)
    return (
        q.new_empty(*q.shape[:3], e),
        q.new_empty(q.shape[:3], dtype=dtype),
        q.new_empty(b, g, f, e, dtype=dtype),
        q.new_empty(b, g, f, dtype=dtype),
        q.new_empty(b, g, dtype=dtype),
    )


@torch.library.custom_op(
    "tarnn::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor? grad_S, Tensor? grad_z, Tensor o, Tensor den, Tensor? S_behind, Tensor? z_behind, "
    f"Tensor? M_behind, bool wants_omega, {_INPUTS}) "
    "-> (Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor key_log_weight, Tensor S, Tensor z, Tensor omega, "
    "Tensor bias)",
)
def backward_op(grad_o, *inputs):
    backward = native_backward if cpu.serves(grad_o) else _eager_backward
    with full_precision(grad_o):
        grads = backward(grad_o, *inputs)
    none = grad_o.new_empty(0)  # an operator cannot return None
    return tuple(none.clone() if x is None else x for x in grads)


def native_backward(grad_o, grad_S, grad_z, o, den, S, z, M, wants_omega, *inputs):
    call = _call(*inputs)
    call.wants_omega = wants_omega
    return cpu.backward(call, grad_o, grad_S, grad_z, o, den, (S, z, M), _cuts(call, inputs[_TENSORS - 1]))


def _eager_backward(grad_o, grad_S, grad_z, o, den, S, z, M, wants_omega, *inputs):
    call, cu_seqlens = _call(*inputs), inputs[_TENSORS - 1]
    call.wants_omega = wants_omega
    if cu_seqlens is None:
        return eager.backward(call, grad_o, grad_S, grad_z, o, den, (S, z, M))
    return _packed_backward(call, cu_seqlens, grad_o, grad_S, grad_z, o, den, (S, z, M))


@backward_op.register_fake
def _(grad_o, grad_S, grad_z, o, den, S_behind, z_behind, M_behind, wants_omega, *inputs):
    _, _, S, z, _ = torch.ops.tarnn.linear_attention(*inputs)
    of_projection = inputs[7:9] if wants_omega else (None, None)
    like = [grad_o.new_empty(0) if x is None else torch.empty_like(x) for x in (*inputs[:5], *of_projection)]
    return (*like[:5], S, z, *like[5:])


def _save_for_backward(ctx, inputs, output):
    """Inputs, o and den; where not causal, copies of the state that all queries read: the one handed out may be written to."""
    causal = inputs[_TENSORS + 1]
    behind = [None] * 3 if causal else [x.clone() for x in output[2:]]
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:2], *behind)
    ctx.options = inputs[_TENSORS:]


def _wants_omega(ctx) -> bool:
    return any(ctx.needs_input_grad[7:9])


def _for_inputs(ctx, tensors, grads) -> tuple[Tensor | None, ...]:
    """A gradient, or None, for each input of the forward."""
    wanted = [x is not None for x in tensors[:7]] + [
        x is not None and _wants_omega(ctx) for x in tensors[7:9]
    ]
    return (*(g if wanted else None for wanted, g in zip(wanted, grads)), *[None] * _CONSTANT)


def _saved(ctx) -> tuple[tuple, tuple]:
    """(inputs, outputs) of the forward, unpacked once: activation checkpointing allows no more."""
    saved = ctx.saved_tensors
    return saved[:_TENSORS], saved[_TENSORS:]


def _backward(ctx, grad_o, grad_den, grad_S, grad_z, grad_M):
    tensors, outputs = _saved(ctx)
    if grad_o is None:
        grad_o = torch.zeros_like(outputs[0])
    grads = torch.ops.tarnn.linear_attention_backward(
        grad_o, grad_S, grad_z, *outputs, _wants_omega(ctx), *tensors, *ctx.options
    )
    return _for_inputs(ctx, tensors, grads)


torch.library.register_autograd("tarnn::linear_attention", _backward, setup_context=_save_for_backward)


class NativeAttention(torch.autograd.Function):
    """The same, for calls that nothing traces: a tenth of the operator's overhead."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = native(*inputs, for_backward=True)
        _save_for_backward(ctx, inputs, outputs)
        ctx.mark_non_differentiable(outputs[1], outputs[4])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # to be differentiated again
            return _backward(ctx, *grads)
        grad_o, _, grad_S, grad_z, _ = grads
        tensors, outputs = _saved(ctx)
        grad_o = torch.zeros_like(outputs[0]) if grad_o is None else grad_o
        found = native_backward(grad_o, grad_S, grad_z, *outputs, _wants_omega(ctx), *tensors, *ctx.options)
        return _for_inputs(ctx, tensors, found)


def _save_for_double_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *inputs[_BEFORE : _BEFORE + _TENSORS])
    ctx.wants_omega, ctx.options = inputs[_BEFORE - 1], inputs[_BEFORE + _TENSORS :]


def _double_backward(ctx, *grads_of_grads):
    """Autograd through the differentiable forward, twice; its outputs, o and others, need no gradient of their own."""
    saved = list(ctx.saved_tensors)
    cotangents, tensors = saved[:3], saved[3:]
    with torch.enable_grad(), full_precision(cotangents[0]):
        # aliases: the graph goes on behind them, so that third derivatives work too
        leaves = [None if x is None else x.view_as(x) for x in cotangents + tensors[:_DIFFERENTIABLE]]
        leaves = [x if x is None or x.requires_grad else x.requires_grad_() for x in leaves]
        outputs = forward(*leaves[3:], *tensors[_DIFFERENTIABLE:], *ctx.options)
        pairs = [(y, g) for y, g in zip((outputs[0], outputs[2], outputs[3]), leaves[:3]) if g is not None]
        inputs = [x for x in leaves[3:] if x is not None]
        first = torch.autograd.grad(
            [y for y, _ in pairs], inputs, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
        gg = list(grads_of_grads[:_DIFFERENTIABLE])
        if not ctx.wants_omega:
            gg[7:] = None, None  # the backward's results there are empty
        gg = [g for x, g in zip(tensors[:_DIFFERENTIABLE], gg) if x is not None]
        used = [(a, b) for a, b in zip(first, gg) if a is not None and b is not None and a.requires_grad]
        wanted = [x for x in leaves if x is not None]
        second = iter(
            torch.autograd.grad(
                [a for a, _ in used], wanted, [b for _, b in used], allow_unused=True,
                create_graph=torch.is_grad_enabled() and any(b.requires_grad for _, b in used),
            )
            if used
            else [None] * len(wanted)
        )  # fmt: skip
    grads = [None if x is None else next(second) for x in leaves]
    return (*grads[:3], *[None] * (_BEFORE - 3), *grads[3:], *[None] * _CONSTANT)


torch.library.register_autograd(
    "tarnn::linear_attention_backward", _double_backward, setup_context=_save_for_double_backward
)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """(1, h, T, …) at token index (n, l) as a batch, (n, h, l, …)."""
    return x[0][:, index].transpose(0, 1)


def _bucket(call: Call, members: Tensor, index: Tensor, real: Tensor) -> Call:
    """The call on some of its sequences, padded to a batch."""
    return replace(
        call,
        q=_pick(call.q, index),
        k=_pick(call.k, index),
        v=_pick(call.v, index),
        log_decay=None if call.log_decay is None else _pick(call.log_decay, index),
        key_log_weight=None if call.key_log_weight is None else _pick(call.key_log_weight, index),
        key_mask=real if call.key_mask is None else real & call.key_mask[0][index],
        S=None if call.S is None else call.S[members],
        z=None if call.z is None else call.z[members],
        M=None if call.M is None else call.M[members],
    )


def _put(target: Tensor | None, source: Tensor | None, index: Tensor, real: Tensor) -> None:
    if target is not None and source is not None:
        target[0][:, index[real]] = source.transpose(0, 1)[:, real].to(target.dtype)


def _packed_forward(call: Call, cu_seqlens: Tensor):
    cuts = packing.bounds(cu_seqlens, call.q.shape[2])
    g, f, e = call.k.shape[1], call.num_features, call.v.shape[3]
    o = call.q.new_empty(*call.q.shape[:3], e)
    den = torch.empty(call.q.shape[:3], dtype=call.dtype, device=call.q.device)
    S = den.new_empty(len(cuts) - 1, g, f, e)
    z, M = S.new_empty(S.shape[:3]), S.new_empty(S.shape[:2])
    for members, index, real in packing.buckets(cuts, call.q.device):
        out, d, S[members], z[members], M[members] = eager.forward(_bucket(call, members, index, real))
        _put(o, out, index, real)
        _put(den, d, index, real)
    return o, den, S, z, M


def _packed_backward(call: Call, cu_seqlens: Tensor, grad_o, grad_S, grad_z, o, den, behind) -> Gradients:
    cuts = packing.bounds(cu_seqlens, call.q.shape[2])
    g, f, e = call.k.shape[1], call.num_features, call.v.shape[3]
    S = den.new_empty(len(cuts) - 1, g, f, e)
    total = Gradients(
        torch.empty_like(call.q),
        torch.empty_like(call.k),
        torch.empty_like(call.v),
        None if call.log_decay is None else torch.empty_like(call.log_decay),
        None if call.key_log_weight is None else torch.empty_like(call.key_log_weight),
        S,
        S.new_empty(S.shape[:3]),
        *(
            torch.zeros_like(x) if x is not None and call.wants_omega else None
            for x in (call.omega, call.bias)
        ),
    )
    for members, index, real in packing.buckets(cuts, call.q.device):
        part = _bucket(call, members, index, real)
        # padded queries must not send gradients back: their output is nobody's
        grad = _pick(grad_o, index).masked_fill(~real[:, None, :, None], 0.0)
        at_S, at_z, *state = (None if x is None else x[members] for x in (grad_S, grad_z, *behind))
        grads = eager.backward(part, grad, at_S, at_z, _pick(o, index), _pick(den, index), state)
        for target, source in zip(total[:5], grads[:5]):
            _put(target, source, index, real)
        total.S[members], total.z[members] = grads.S, grads.z
        for sum_, part_of_it in ((total.omega, grads.omega), (total.bias, grads.bias)):
            if sum_ is not None and part_of_it is not None:
                sum_ += part_of_it
    return total
