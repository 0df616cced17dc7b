"""Converted Llamas and their relatives as the fused step takes them: a description for each of transformers' classes.

The classes are named, not imported: a file of transformers is loaded by who uses its models.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.activations import SiLUActivation

from tarnn.conversion.options import DEFAULTS, child_of, converted_layers

EXACT = (None, "eager", "sdpa")  # attention that is softmax over all keys
# whose angles are the same at every length; the others also change what they multiply with
ROTARY = ("default", "linear", "llama3")


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


def describe_layer(layer: Any, plan: Any, frequencies: Any) -> Any:
    attention = plan.add(layer.self_attn, frequencies)
    norms = plan.add(layer.input_layernorm), plan.add(layer.post_attention_layernorm)
    return plan.layer(norms[0], attention, norms[1], plan.add(layer.mlp))


def describe_attention(attention: Any, plan: Any, frequencies: Any) -> Any:
    """Softmax, or what `set_options` made of it."""
    d, own, name = attention.head_dim, child_of(attention), attention.config._attn_implementation
    if attention.scaling != d**-0.5:
        raise plan.refusal(attention, "has another scale than 1/√d")
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    if window is not None or hasattr(attention, "tarnn_callback"):
        raise plan.refusal(attention, "has a sliding window of its own, or is being calibrated")
    inputs = tuple(map(plan.add, (attention.q_proj, attention.k_proj, attention.v_proj)))
    h, g = (len(x.weight) // d for x in inputs[:2])
    norms = {x: plan.add(getattr(attention, x)) for x in ("q_norm", "k_norm") if hasattr(attention, x)}
    facts = {"heads": (h, g, d), "inputs": inputs, "output": plan.add(attention.o_proj), "frequencies": frequencies}
    if name not in DEFAULTS:
        if name not in EXACT:
            raise plan.refusal(attention, f"computes {name} attention, not softmax over all keys")
        return plan.attention("softmax", **facts, **norms)
    if own is None:
        raise plan.refusal(attention, "has no options (tarnn.conversion.set_options gives it some)")
    options = DEFAULTS[name]._replace(**own.options)
    if options.slots:
        raise plan.refusal(attention, "has slots")
    hybrid = plan.add(own, window=options.window, sinks=options.sinks, far_until=options.far_until)
    return plan.attention("hybrid", **facts, **norms, **hybrid)


def describe_rotary(rotary: Any, plan: Any) -> Any:
    if rotary.rope_type not in ROTARY or rotary.attention_scaling != 1:
        raise plan.refusal(rotary, f"has positions of another kind ({rotary.rope_type})")
    return rotary.inv_freq


PARTS: dict[str, Callable[..., Any]] = {
    "ForCausalLM": describe_causal,
    "Model": describe_backbone,
    "DecoderLayer": describe_layer,
    "Attention": describe_attention,
    "RotaryEmbedding": describe_rotary,
    "RMSNorm": describe_norm,
    "MLP": describe_mlp,
}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    (f"transformers.models.{family.lower()}.modeling_{family.lower()}", f"{family}{part}"): describe
    for family in FAMILIES
    for part, describe in PARTS.items()
}


def classes_of(model: nn.Module) -> dict[type, Callable[..., Any]]:
    """The descriptions of a model's modules, by their very classes."""
    kinds = {type(x) for x in model.modules()}
    return {kind: NAMES[place] for kind in kinds if (place := (kind.__module__, kind.__name__)) in NAMES}


def converted_classes(model: nn.Module) -> dict[type, Callable[..., Any]] | None:
    """The descriptions of the modules of a converted model; None for another, which its program describes."""
    return classes_of(model) if converted_layers(model) else None


def is_described(model: nn.Module) -> bool:
    """Whether it is a language model of one of these families, by its very class."""
    return NAMES.get((type(model).__module__, type(model).__name__)) is describe_causal
