"""Describe for the fused step what language models of transformers have in common."""

from typing import Any

from torch import nn
from transformers.activations import SiLUActivation


def describe_causal(model: Any, plan: Any) -> None:
    plan.add(model.model)
    plan.head = plan.add(model.lm_head)


def describe_backbone(model: Any, plan: Any) -> None:
    plan.tokens, plan.last_norm = plan.add(model.embed_tokens), plan.add(model.norm)
    frequencies = plan.add(model.rotary_emb)
    plan.layers = [plan.add(layer, frequencies) for layer in model.layers[: model.config.num_hidden_layers]]


def describe_norm(norm: Any, plan: Any) -> Any:
    return plan.norm(norm.weight, eps=norm.variance_epsilon)


def describe_mlp(mlp: Any, plan: Any) -> Any:
    if type(mlp.act_fn) not in (SiLUActivation, nn.SiLU):
        raise plan.refusal(mlp, "has another function than silu")
    return plan.feed_forward(plan.add(mlp.up_proj), plan.add(mlp.down_proj), plan.add(mlp.gate_proj))
