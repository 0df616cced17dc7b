"""flash-linear-attention's naive functions with the arguments of its kernels: token by token, in float32."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

KERNELS = {  # module → its functions that tarnn calls
    "simple_gla": ("chunk_simple_gla",),
    "gla": ("chunk_gla",),
    "gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("chunk_kda", "fused_recurrent_kda"),
}


def take_the_place_of_kernels(monkeypatch) -> list[str]:
    """Put the naive functions where tarnn finds the kernels. Return a list of the names of those that are called."""
    called: list[str] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(f"fla.ops.{module}.{name}", _like_a_kernel(globals()[module], name, called))
    return called


def _like_a_kernel(naive: Callable, name: str, called: list[str]) -> Callable:
    def kernel(*, output_final_state: bool, scale: float, cu_seqlens=None, **tensors: Tensor):
        called.append(name)
        assert all(x.dtype == (torch.bfloat16 if n in "qkv" else torch.float32) for n, x in tensors.items())
        assert all(x.isfinite().all() for n, x in tensors.items() if n != "q"), "the kernels would spread it"
        o, S = _Kernel.apply(partial(_by_sequence, naive, scale, cu_seqlens), [*tensors], *tensors.values())
        return o, S if output_final_state else None

    return kernel


def _by_sequence(naive: Callable, scale: float, cu_seqlens: Tensor | None, tensors: dict[str, Tensor]):
    dtype, state = tensors["v"].dtype, tensors.get("initial_state")
    cuts = None if cu_seqlens is None else cu_seqlens.tolist()
    spans = [slice(None)] if cuts is None else [slice(i, j) for i, j in zip(cuts, cuts[1:])]
    in_time, parts = {n: x for n, x in tensors.items() if n != "initial_state"}, []
    for row, at in enumerate(spans):
        before = state if state is None or cuts is None else state[row : row + 1]
        parts.append(naive(**{n: x[:, at].float() for n, x in in_time.items()}, scale=scale, state=before))
    o, S = (torch.cat(xs, axis) for xs, axis in zip(zip(*parts), (1, 0)))
    return o.to(dtype), S


class _Kernel(torch.autograd.Function):
    """One node of autograd's graph, as a kernel is."""

    @staticmethod
    def forward(ctx, run: Callable, names: list[str], *tensors: Tensor):
        ctx.run, ctx.names = run, names
        ctx.save_for_backward(*tensors)
        return run(dict(zip(names, tensors)))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        _, pull = torch.func.vjp(lambda *tensors: ctx.run(dict(zip(ctx.names, tensors))), *ctx.saved_tensors)
        return None, None, *pull(grads)


def simple_gla(q, k, v, scale, state, g=None):
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    g = q.new_zeros(q.shape[:3]) if g is None else g
    return naive_recurrent_simple_gla(q, k, v, g, scale=scale, initial_state=state, output_final_state=True)


def gla(q, k, v, g, scale, state):
    from fla.ops.gla.naive import naive_recurrent_gla

    q = q * scale * q.shape[-1] ** 0.5  # it scales by itself
    return naive_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True)


def gated_delta_rule(q, k, v, g, beta, scale, state):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, state, output_final_state=True)


def kda(q, k, v, g, beta, scale, state):
    from fla.ops.kda.naive import naive_recurrent_kda

    return naive_recurrent_kda(q, k, v, g, beta, scale, state, output_final_state=True)
