"""Causal linear attention by flash-linear-attention's kernels of gated linear attention.

Features are computed in float32 and rounded to bfloat16. The kernel's values are v' = [v | 1 | 0…]: its outputs are numerators
and, in the column of ones, denominators, each rounded once to bfloat16; its state is [S | z], in float32. What several heads
share is repeated, since these kernels want as many heads of each.

    no decay, or one per token    chunk_simple_gla(q, k, v, g)
    a decay per channel           chunk_gla(q, k, v, g)
    one token                     plain PyTorch: three operations
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.eager.linear import step as step
from tarnn.kernels.eager.segments import call_features
from tarnn.kernels.fla import availability, stages
from tarnn.kernels.fla.stages import Stages, Tensors
from tarnn.kernels.linear import BackwardInputs, Call, Gradients, Outputs


def refusal(call: Call) -> str | None:
    """Return why the kernels can't compute this call, or None."""
    if availability.is_elsewhere(call.q):
        return availability.ELSEWHERE
    if not call.causal:
        return "flash-linear-attention's kernels are causal; attention to both sides is two products in plain PyTorch."
    if call.weighted:
        return "flash-linear-attention keeps no running maximum, which log-weights and exponential features need."
    return availability.refusal(call.q, call.v, call.num_features)


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    call.cuts()  # ValueError for bounds that don't cut the row
    found = _stages(call, with_state).outputs(stages.tensors_of(call, Gradients))
    o, den = stages.laid_out(found["o"], call.new_o()), found["den"].contiguous()
    if not with_state:
        return Outputs(o, den, None, None, None)
    S, z = found["S"].contiguous(), found["z"].contiguous()
    return Outputs(o, den, S, z, z.new_zeros(z.shape[:2]))


def backward(call: Call, returned: BackwardInputs) -> Gradients:
    return stages.gradients_of(call, returned, _stages, ("o", "S", "z"))


def _stages(call: Call, with_state: bool) -> Stages:
    return Stages(partial(_prepare, call), partial(_kernel, call, with_state), partial(_finish, call))


def _prepare(call: Call, tensors: Tensors) -> Tensors:
    """The arguments of the kernel, each with `num_heads` heads."""
    call = call._replace(**tensors)  # type: ignore[arg-type]
    masked = None if call.key_mask is None else ~call.key_mask[:, None]
    phi_q, _ = call_features(call, call.q.to(call.dtype))
    phi_k, _ = call_features(call, stages.without(call.k, masked).to(call.dtype))
    phi = {"q": phi_q.to(call.q.dtype), "k": phi_k.to(call.q.dtype)}  # at masked keys v' = 0
    inputs = {name: call.for_values(stages.padded(x)) for name, x in phi.items()}
    column = pad(torch.ones_like(call.v[..., :1]), (0, -(call.v.shape[3] + 1) % stages.SIDE))
    inputs["v"] = stages.without(torch.cat([call.v, column], -1), masked)
    if call.log_decay is not None:
        inputs["g"] = stages.faded(call, masked)
    if call.S is not None and call.z is not None:
        inputs["initial_state"] = stages.padded(torch.cat([call.S, call.z[..., None]], -1), 2)
    if (shared := call.num_heads // call.v.shape[1]) > 1:
        inputs |= {name: x.repeat_interleave(shared, 1) for name, x in inputs.items() if name != "q"}
    return {name: x if name == "initial_state" else stages.in_time(x) for name, x in inputs.items()}


def _kernel(call: Call, with_state: bool, inputs: Tensors) -> Tensors:
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return stages.results(chunk_gla if call.has_channels else chunk_simple_gla, call, inputs, 1.0, with_state)


def _finish(call: Call, results: Tensors) -> Tensors:
    e, found = call.v.shape[3], stages.in_time(results["o"])
    den = found[..., e].to(call.dtype)
    outputs = {"o": (found[..., :e] * _factor(call, den)[..., None]).to(call.v.dtype), "den": den.detach()}
    if "S" in results:
        state = results["S"][:, :: call.num_heads // call.v.shape[1], : call.num_features]
        outputs |= {"S": state[..., :e], "z": state[..., e]}
    return outputs


def _factor(call: Call, den: Tensor) -> Tensor:
    """Return the factor of numerators: 1/max(|den|, 1), or 1/(den + eps) and 0 where den is 0, or 1."""
    if call.at_least_one:
        return 1 / den.abs().clamp(min=1.0)
    return 1 / (den + call.eps).masked_fill(den == 0, torch.inf) if call.normalize else torch.ones_like(den)
