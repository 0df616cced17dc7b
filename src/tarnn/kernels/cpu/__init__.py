"""Linear attention by the compiled kernels (csrc/): what `eager.py` computes, at the speed of the processor.

The kernels take any strides and any of the four floating types, so nothing is copied here but small things: decays
and log-weights become the wide type, states contiguous. Results are allocated here and written there. How the
kernels work: docs/kernels.md.
"""

import torch
from torch import Tensor

from tarnn.kernels.cpu import library
from tarnn.kernels.eager import Call, Gradients
from tarnn.kernels.features import NAMES

CHUNK = 32  # positions: the (c × c) products within a chunk cost c·(d + e) flops a token, those across 4·d·e
CHUNK_OF_MANY = 64  # where features are projected: they are many, or states the only products
CHUNK_WITH_CHANNELS = 16  # within a chunk, each pair of positions then costs f multiplications of its own
STRETCH = 512  # positions: no shorter does a sequence get cut to keep more cores busy
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def serves(x: Tensor) -> bool:
    """Whether the compiled kernels are there for tensors such as x."""
    return x.device.type == "cpu" and x.dtype in DTYPES and library.available()


def forward(
    call: Call, cuts: list[int] | None = None, *, for_backward: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """As `eager.forward`; with `cuts`, the row (b = 1) is len(cuts) − 1 sequences end to end, each with a state.

    The denominators are for `backward` alone; where there will be none, they are None, and never written.
    """
    q = call.q
    o = q.new_empty(*q.shape[:3], call.v.shape[3])
    den = q.new_empty(q.shape[:3], dtype=call.dtype) if for_backward else None
    S, z, M = _state_like(call, cuts)
    torch.ops.tarnn_cpu.forward(*_inputs(call, cuts), o, den, S, z, M, *_options(call))
    return o, den, S, z, M


def backward(
    call: Call,
    grad_o: Tensor,
    grad_S: Tensor | None,
    grad_z: Tensor | None,
    o: Tensor,
    den: Tensor,
    behind: tuple[Tensor | None, ...] = (None, None, None),
    cuts: list[int] | None = None,
) -> Gradients:
    """As `eager.backward`; `cuts` as above. behind: where not causal, S, z and M as `forward` returned them."""
    S, z, _ = _state_like(call, cuts)
    decay, weight = (
        None if x is None else torch.empty(x.shape, dtype=call.dtype)
        for x in (call.log_decay, call.key_log_weight)
    )
    omega, bias = (
        torch.zeros_like(x) if x is not None and call.wants_omega else None for x in _projection(call)
    )
    grads = Gradients(
        torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v), decay, weight, S, z, omega, bias
    )  # fmt: skip
    grad_S, grad_z = (None if x is None else x.to(call.dtype).contiguous() for x in (grad_S, grad_z))
    torch.ops.tarnn_cpu.backward(
        grad_o, grad_S, grad_z, o, den.contiguous(), *behind, *_inputs(call, cuts), *grads, *_options(call)
    )
    return grads._replace(
        log_decay=_as(decay, call.log_decay), key_log_weight=_as(weight, call.key_log_weight),
        omega=_as(omega, call.omega), bias=_as(bias, call.bias),
    )  # fmt: skip


def _as(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """In the dtype of the input that it is the gradient of."""
    return None if grad is None or x is None else grad.to(x.dtype)


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, key_log_weight: Tensor | None,
    S: Tensor, z: Tensor, M: Tensor | None, omega: Tensor | None, bias: Tensor | None,
    feature_map: str, normalize: bool, eps: float, projection: tuple[float, ...], inplace: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """One token for every row and head in one call: (o (b, h, 1, e), (S, z, M)), the state written in place if asked.

    q (b, h, 1, d), k (b, g, 1, d), v (b, g, 1, e); log_decay (b, g, 1) or (b, g, 1, f), key_log_weight (b, g, 1).
    M None: nothing has a log-weight. omega, bias and projection (factor, square, offset, shift) as in `Call`.
    """
    o = q.new_empty(*q.shape[:3], v.shape[3])
    log_decay, key_log_weight = (None if x is None else x.to(S.dtype) for x in (log_decay, key_log_weight))
    omega, bias = (None if x is None else x.to(S.dtype).contiguous() for x in (omega, bias))
    before = (S.contiguous(), z.contiguous(), None if M is None else M.contiguous())
    after = before
    if not inplace:
        S_before, z_before, M_before = before
        after = (
            torch.empty_like(S_before),
            torch.empty_like(z_before),
            None if M_before is None else torch.empty_like(M_before),
        )
    torch.ops.tarnn_cpu.step(
        q, k, v, log_decay, key_log_weight, *before, omega, bias, o, *after, NAMES.index(feature_map), normalize, eps,
        *projection,
    )  # fmt: skip
    if not inplace:
        return o, after
    for x, y in zip((S, z, M), after):
        if x is not None and y is not None and x is not y:  # x isn't contiguous
            x.copy_(y)
    return o, (S, z, M)


def _state_like(call: Call, cuts: list[int] | None) -> tuple[Tensor, Tensor, Tensor]:
    b, g, f = *call.k.shape[:2], call.num_features
    b = b if cuts is None else len(cuts) - 1
    S = call.k.new_empty(b, g, f, call.v.shape[3], dtype=call.dtype)
    return S, S.new_empty(b, g, f), S.new_empty(b, g)


def _projection(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Ω and β as the kernels read them."""
    omega, bias = (None if x is None else x.to(call.dtype).contiguous() for x in (call.omega, call.bias))
    return omega, bias


def _inputs(call: Call, cuts: list[int] | None) -> tuple:
    wide = [None if x is None else x.to(call.dtype) for x in (call.log_decay, call.key_log_weight)]
    state = [None if x is None else x.contiguous() for x in (call.S, call.z, call.M)]
    bounds = None if cuts is None else torch.tensor(cuts, dtype=torch.int64)
    return (call.q, call.k, call.v, *wide, *state, call.key_mask, bounds, *_projection(call))


def _options(call: Call) -> tuple:
    has_channels = call.log_decay is not None and call.log_decay.ndim == 4
    chunk = CHUNK_WITH_CHANNELS if has_channels else CHUNK if call.omega is None else CHUNK_OF_MANY
    name = NAMES.index(call.feature_map)
    projection = (call.factor, call.square, call.offset, call.shift)
    return name, call.causal, call.normalize, call.weighted, call.eps, chunk, STRETCH, *projection
