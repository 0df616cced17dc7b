"""transformers' Mamba-2, as the fused step is told of it."""

from typing import Any

from torch import nn
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from tarnn.decoding.parts import Product
from tarnn.huggingface.described.common import describe_norm


def describe_model(model: mamba2.Mamba2ForCausalLM, plan: Any) -> None:
    plan.add(model.backbone)
    plan.head = plan.add(model.lm_head)


def describe_backbone(model: mamba2.Mamba2Model, plan: Any) -> None:
    plan.tokens, plan.last_norm = plan.add(model.embeddings), plan.add(model.norm_f)
    plan.layers = [plan.add(x) for x in model.layers]


def describe_block(block: mamba2.Mamba2Block, plan: Any) -> Any:
    return plan.layer(plan.add(block.norm), plan.add(block.mixer))


def describe_mixer(mixer: mamba2.Mamba2Mixer, plan: Any) -> Any:
    if mixer.activation not in ("silu", "swish"):
        raise plan.refusal(mixer, f"has {mixer.activation} behind its filters, not silu")
    if tuple(mixer.time_step_limit) != (0.0, float("inf")):
        raise plan.refusal(mixer, "limits its time steps in a prompt, and not token by token (time_step_limit)")
    widths = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    (gate, filtered, steps), filters = plan.add(mixer.in_proj).split(widths), plan.add(mixer.conv1d)
    return plan.ssd(
        heads=mixer.num_heads,
        groups=mixer.n_groups,
        filtered=filtered,
        gate=gate,
        steps=steps,
        output=plan.add(mixer.out_proj),
        filters=filters.weight,
        filter_bias=filters.bias,
        step_bias=mixer.dt_bias,
        A=-mixer.A_log.float().exp(),
        D=mixer.D,
        norm=plan.add(mixer.norm),
        kept=mixer.conv_kernel_size,
    )


def describe_filters(module: nn.Conv1d, plan: Any) -> Any:
    return Product(module.weight[:, 0], module.bias)


CLASSES = {
    mamba2.Mamba2ForCausalLM: describe_model,
    mamba2.Mamba2Model: describe_backbone,
    mamba2.Mamba2Block: describe_block,
    mamba2.Mamba2Mixer: describe_mixer,
    mamba2.Mamba2RMSNorm: describe_norm,
    mamba2.MambaRMSNormGated: describe_norm,
    nn.Conv1d: describe_filters,
}
