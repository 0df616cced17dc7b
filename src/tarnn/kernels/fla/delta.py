"""The delta rule by flash-linear-attention's kernels: chunks of a sequence, and one token.

    no decay, or one per token    chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    a decay per channel           chunk_kda, fused_recurrent_kda (Kimi's delta attention)

At masked tokens β, k, v and the log-decay are 0, so nothing happens there. States are float32.
"""

from functools import partial
from typing import Any

import torch

from tarnn.kernels.delta import Call, Gradients, Outputs
from tarnn.kernels.eager.delta_chunks import normalized
from tarnn.kernels.fla import availability, stages
from tarnn.kernels.fla.stages import Stages, Tensors


def refusal(call: Call) -> str | None:
    """Return why the kernels can't compute this call, or None."""
    if availability.is_elsewhere(call.q):
        return availability.ELSEWHERE
    if call.q.shape[1] > call.v.shape[1]:
        return "flash-linear-attention has a state for each query head; queries that share one are for plain PyTorch."
    return availability.refusal(call.q, call.v, call.q.shape[3])


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    call.cuts()  # ValueError for bounds that don't cut the row
    found = _stages(call, with_state).outputs(stages.tensors_of(call, Gradients))
    return Outputs(stages.laid_out(found["o"], call.new_o()), found["S"].contiguous() if with_state else None)


def backward(call: Call, returned: Any) -> Gradients:
    return stages.gradients_of(call, returned, _stages, ("o", "S"))


def step(call: Call, *, inplace: bool = False) -> Outputs:
    """One token; with `inplace` the state is written into the call's own."""
    found = _stages(call, True, one_token=True).outputs(stages.tensors_of(call, Gradients))
    S = found["S"].contiguous() if call.S is None or not inplace else call.S.copy_(found["S"])
    return Outputs(stages.laid_out(found["o"], call.new_o()), S)


def _stages(call: Call, with_state: bool, one_token: bool = False) -> Stages:
    return Stages(partial(_prepare, call), partial(_kernel, call, with_state, one_token), partial(_finish, call))


def _prepare(call: Call, tensors: Tensors) -> Tensors:
    call = call._replace(**tensors)  # type: ignore[arg-type]
    masked = None if call.key_mask is None else ~call.key_mask[:, None]
    q, k = (normalized(x.to(call.dtype), call.norm_eps).to(x.dtype) for x in (call.q, stages.without(call.k, masked)))
    inputs = {"q": stages.padded(q), "k": stages.padded(k), "v": stages.padded(stages.without(call.v, masked))}
    inputs["beta"] = stages.without(call.beta.to(call.dtype), masked)
    inputs["g"] = torch.zeros_like(inputs["beta"]) if call.log_decay is None else stages.faded(call, masked)
    inputs = {name: stages.in_time(x) for name, x in inputs.items()}
    return inputs if call.S is None else inputs | {"initial_state": stages.padded(call.S, 2)}


def _kernel(call: Call, with_state: bool, one_token: bool, inputs: Tensors) -> Tensors:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    by_chunks = chunk_kda if call.has_channels else chunk_gated_delta_rule
    by_token = fused_recurrent_kda if call.has_channels else fused_recurrent_gated_delta_rule
    return stages.results(by_token if one_token else by_chunks, call, inputs, call.scale, with_state)


def _finish(call: Call, results: Tensors) -> Tensors:
    d, e = call.k.shape[3], call.v.shape[3]
    outputs = {"o": stages.in_time(results["o"])[..., :e]}
    return outputs | {"S": results["S"][..., :d, :e]} if "S" in results else outputs
