"""Linear attention by the compiled kernels (csrc/): what `eager` computes, at the speed of the processor.

The kernels take any strides, float32, bfloat16 and float16, so nothing is copied here but small things: decays
and log-weights become the wide type, states contiguous. Results are allocated here and written there. How the
kernels work: docs/kernels.md.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.cpu import arguments, library
from tarnn.kernels.features import NAMES
from tarnn.kernels.linear import BackwardInputs, Call, Gradients, Outputs

# positions: the (c × c) products within a chunk cost c·(d + e) flops per token, those across 4·d·e
CHUNK = 32
CHUNK_OF_MANY = 64  # where features are projected: they are many, or states the only products
BLOCK = 64  # where tokens pass over the state in pairs: how many have their features made at a time
CHUNK_WITH_CHANNELS = 16  # within a chunk, each pair of positions then costs f multiplications of its own
# positions, at least, and at least eight chunks: forward keeps the state before each segment, backward has room for those in one
SEGMENT = 256
STRETCH = 512  # positions: no shorter does a sequence get cut to keep more cores busy
STATES_TOGETHER = 1 << 20  # bytes of states and of their gradients, of the heads that share q and k in one task


def refusal(call: Call) -> str | None:
    """Why the compiled kernels can't compute this call, or None."""
    return arguments.refusal(call.q)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    """Run the forward kernel. `den` is None unless `for_backward`; S, z, M are None unless `with_state` or needed by backward."""
    read_again = for_backward and not call.causal
    outputs = call.new_outputs(den=for_backward, state=with_state or read_again)
    kept = _new_kept(call) if for_backward and call.causal and not _streamed(call) else None
    torch.ops.tarnn_cpu.forward.default(*_inputs(call), *_options(call), *outputs[:5], kept)
    return outputs if kept is None else outputs._replace(kept=kept)


def _new_kept(call: Call) -> Tensor | None:
    """For the states before all segments of a row and head but the first: S, z and M."""
    (b, m, t, _), f = call.v.shape, call.num_features
    count = (t - 1) // _segment(call)
    return None if count < 1 else call.q.new_empty(b, m, count, f * call.v.shape[3] + f + 1, dtype=call.dtype)


def backward(call: Call, returned: BackwardInputs) -> Gradients:
    grads = _with_room(call.new_gradients(returned), call)
    grad_S, grad_z = (arguments.in_a_row(x, call.dtype) for x in (returned.grad_S, returned.grad_z))
    torch.ops.tarnn_cpu.backward.default(
        returned.grad_o,
        grad_S,
        grad_z,
        returned.o,
        returned.den.contiguous(),
        returned.S_behind,
        returned.z_behind,
        returned.M_behind,
        returned.kept,
        *_inputs(call),
        *_options(call),
        *grads,
    )
    return _of_groups(grads, call).of(call)


def _with_room(grads: Gradients, call: Call) -> Gradients:
    """With as many gradients of q and k as tasks share each head between them; where values are not grouped, one."""
    parts = call.values_per_key // _together(call)
    if call.values_per_key == 1 or parts == 1:
        return grads
    (b, h, t, d), dtype = call.q.shape, call.dtype
    return grads._replace(
        q=call.q.new_empty(b, h * parts, t, d, dtype=dtype), k=grads.k.new_empty(b, h * parts, t, d, dtype=dtype)
    )


def _of_groups(grads: Gradients, call: Call) -> Gradients:
    """The parts of each head's gradients summed, one after the other, so that no bit depends on threads."""
    parts = grads.q.shape[1] // call.q.shape[1] if call.q.shape[1] else 1
    if parts == 1:
        return grads
    q, k = (sum(x.unflatten(1, (-1, parts)).unbind(2)) for x in (grads.q, grads.k))
    return grads._replace(q=q, k=k)


def _together(call: Call) -> int:
    """How many heads of values that share q and k one task takes, so that their gradients are summed there: as many as
    have their states in the cache, by shape alone."""
    bytes_of_head = 2 * (call.v.shape[3] + 1) * call.num_features * call.dtype.itemsize
    fitting = [
        n
        for n in range(1, call.values_per_key + 1)
        if call.values_per_key % n == 0 and n * bytes_of_head <= STATES_TOGETHER
    ]
    return max(fitting, default=1)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token for every row and head in one call; autograd is told of tensors that are written in place."""
    S: Any
    z: Any
    M: Any
    q, k, v, log_decay, weight, S, z, omega, bias, M, _, _, function, _, normalize, eps, *numbers, at_least_one = call
    wide = S.dtype
    if M is None and call.weighted:
        M = z.new_zeros(z.shape[:2])
    before = (S.contiguous(), z.contiguous(), None if M is None else M.contiguous())
    after: Any = before if inplace else [None if x is None else torch.empty_like(x) for x in before]
    o = torch.empty_like(v) if q.shape == v.shape else v.new_empty((len(q), call.num_heads, 1, v.shape[3]))
    torch.ops.tarnn_cpu.step.default(
        q,
        k,
        v,
        None if log_decay is None else log_decay.to(wide),
        None if weight is None else weight.to(wide),
        *before,
        arguments.in_a_row(omega, wide),
        arguments.in_a_row(bias, wide),
        o,
        *after,
        NAMES.index(function),
        normalize,
        at_least_one,
        eps,
        *numbers,
    )
    if not inplace:
        return Outputs(o, None, *after)
    for x, y in zip((S, z, M), after):
        if x is not y:  # x isn't contiguous
            x.copy_(y)
    increment_version((S, z) if M is None else (S, z, M))
    return Outputs(o, None, S, z, M)


def _inputs(call: Call) -> tuple:
    """The tensors, as the kernels read them. (Without generators: for short sequences, this is a part of the time.)"""
    q, k, v, decay, weight, S, z, omega, bias, M, key_mask, *_ = call
    wide = call.dtype
    return (
        q,
        k,
        v,
        None if decay is None else decay.to(wide),
        None if weight is None else weight.to(wide),
        arguments.in_a_row(S, wide),
        arguments.in_a_row(z, wide),
        arguments.in_a_row(M, wide),
        key_mask,
        arguments.bounds(call),
        arguments.in_a_row(omega, wide),
        arguments.in_a_row(bias, wide),
    )


def _streamed(call: Call) -> bool:
    """Whether the backward pass goes token by token, as the forward pass does. With decays, log-weights, keys that several
    heads share, and products in bfloat16 it goes by chunks."""
    in_bfloat16 = call.q.dtype == torch.bfloat16 and library.multiplies_in_bfloat16()
    alone = call.q.shape[1] == call.v.shape[1]
    bare = call.log_decay is None and not call.weighted and not call.at_least_one
    return call.causal and alone and bare and not in_bfloat16


def _chunk(call: Call) -> int:
    """Positions of a chunk."""
    return CHUNK_WITH_CHANNELS if call.has_channels else CHUNK if call.omega is None else CHUNK_OF_MANY


def _segment(call: Call) -> int:
    """Positions of a segment."""
    return max(SEGMENT, 8 * _chunk(call))


def _options(call: Call) -> tuple:
    numbers = (call.factor, call.square, call.offset, call.shift)
    division = (call.normalize, call.at_least_one)
    how = (NAMES.index(call.function), call.causal, *division, call.weighted, call.eps, _streamed(call))
    return (*how, _chunk(call), BLOCK, _segment(call), STRETCH, *numbers)
