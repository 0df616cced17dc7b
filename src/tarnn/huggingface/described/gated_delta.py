"""transformers' models with the gated delta rule, as the fused step is told of them: Qwen3-Next, Qwen3.5, OLMo-hybrid."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tarnn.decoding.parts import Product
from tarnn.huggingface.described.common import describe_backbone, describe_causal, describe_mlp, describe_norm

EXACT = (None, "eager", "sdpa")  # attention that is softmax over all keys


def describe_rotary(rotary: Any, plan: Any) -> Tensor:
    if rotary.rope_type != "default" or rotary.attention_scaling != 1:
        raise plan.refusal(rotary, f"scales positions ({rotary.rope_type})")
    return rotary.inv_freq


def describe_layer(layer: Any, plan: Any, frequencies: Tensor | None) -> Any:
    linear = layer.block_type == "linear_attention"
    mixer = plan.add(layer.linear_attn) if linear else plan.add(layer.self_attn, frequencies)
    return plan.layer(
        plan.add(layer.input_layernorm), mixer, plan.add(layer.post_attention_layernorm), plan.add(layer.mlp)
    )


def describe_olmo_linear(layer: Any, plan: Any, frequencies: Tensor | None) -> Any:
    norms = plan.add(layer.input_layernorm), plan.add(layer.post_attention_layernorm)
    return plan.layer(norms[0], plan.add(layer.linear_attn), norms[1], plan.add(layer.mlp))


def describe_olmo_attention_layer(layer: Any, plan: Any, frequencies: Tensor | None) -> Any:
    norms = plan.add(layer.post_attention_layernorm), plan.add(layer.post_feedforward_layernorm)
    mixer, mlp = plan.add(layer.self_attn, frequencies), plan.add(layer.mlp)
    return plan.layer(norms[0], mixer, norms[1], mlp, normed_inside=True)


def describe_attention(attention: Any, plan: Any, frequencies: Tensor | None) -> Any:
    """Each head of q_proj has its queries, then the gate of its outputs."""
    d = attention.head_dim
    q, gate = _by_head(plan.add(attention.q_proj), d, d)
    return _softmax(attention, plan, frequencies, q, gate=gate)


def describe_olmo_attention(attention: Any, plan: Any, frequencies: Tensor | None) -> Any:
    return _softmax(attention, plan, frequencies, plan.add(attention.q_proj), whole_norms=True)


def _softmax(attention: Any, plan: Any, frequencies: Tensor | None, q: Product, **options: Any) -> Any:
    d, kind = attention.head_dim, attention.config._attn_implementation
    if attention.scaling != d**-0.5:
        raise plan.refusal(attention, "has another scale than 1/√d")
    if kind not in EXACT:
        raise plan.refusal(attention, f"computes {kind} attention, not softmax over all keys")
    inputs = (q, plan.add(attention.k_proj), plan.add(attention.v_proj))
    heads = (len(q.weight) // d, len(inputs[1].weight) // d, d)
    norms = plan.add(attention.q_norm), plan.add(attention.k_norm)
    if frequencies is not None:
        options |= {"frequencies": frequencies, "rotary_dim": 2 * len(frequencies)}
    return plan.attention("softmax", heads, inputs, plan.add(attention.o_proj), *norms, **options)


def describe_qwen3_next_delta(layer: Any, plan: Any) -> Any:
    """Both projections go key head by key head: queries, keys, values and gates of its states; β and what decays are made of."""
    each = layer.num_v_heads // layer.num_k_heads
    d, wide = layer.head_k_dim, each * layer.head_v_dim
    first, second = (
        _by_head(plan.add(layer.in_proj_qkvz), d, d, wide, wide),
        _by_head(plan.add(layer.in_proj_ba), each, each),
    )
    return _delta(layer, plan, first, second, plan.add(layer.norm), plan.add(layer.out_proj))


def _by_head(product: Product, *widths: int) -> list[Product]:
    """Products of these widths, which take turns in one, head by head."""
    weights = product.weight.unflatten(0, (-1, sum(widths))).split(list(widths), 1)
    biases: Sequence[Tensor | None] = [None] * len(widths)
    if product.bias is not None:
        biases = [x.flatten() for x in product.bias.unflatten(0, (-1, sum(widths))).split(list(widths), 1)]
    return [Product(w.flatten(0, 1), b) for w, b in zip(weights, biases, strict=True)]


def describe_qwen3_5_delta(layer: Any, plan: Any) -> Any:
    inputs = _by_head(plan.add(layer.in_proj_qkv), layer.key_dim, layer.key_dim, layer.value_dim)
    inputs.append(plan.add(layer.in_proj_z))
    gates = plan.add(layer.in_proj_b), plan.add(layer.in_proj_a)
    return _delta(layer, plan, inputs, gates, plan.add(layer.norm), plan.add(layer.out_proj))


def describe_olmo_delta(layer: Any, plan: Any) -> Any:
    inputs = [plan.add(x) for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj)]
    gates, strength = (plan.add(layer.b_proj), plan.add(layer.a_proj)), 2.0 if layer.allow_neg_eigval else 1.0
    return _delta(layer, plan, inputs, gates, plan.add(layer.o_norm), plan.add(layer.o_proj), strength)


def _delta(layer: Any, plan: Any, inputs, gates, norm: Any, output: Product, strength: float = 1.0) -> Any:
    """inputs: queries, keys, values, the outputs' gate. gates: β, and what decays are made of."""
    if layer.activation not in ("silu", "swish"):
        raise plan.refusal(layer, f"has {layer.activation} behind its filters, not silu")
    beta, steps = gates
    bias = layer.dt_bias if steps.bias is None else layer.dt_bias.float() + steps.bias.float()
    return plan.delta(
        (layer.num_k_heads, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim),
        (*inputs, beta),
        plan.add(layer.conv1d),
        output,
        norm,
        plan.decay("token", rows=Product(steps.weight, bias)),
        rate=layer.A_log.float().exp(),
        strength=strength,
        kept=layer.conv_kernel_size,
    )


def describe_filters(module: nn.Conv1d, plan: Any) -> Tensor:
    if module.bias is not None:
        raise plan.refusal(module, "has a bias")
    return module.weight[:, 0]


def describe_gated_norm(norm: Any, plan: Any) -> Any:
    if norm.activation not in ("silu", "swish"):
        raise plan.refusal(norm, f"gates by {norm.activation}, not silu")
    return plan.norm(norm.weight, eps=norm.variance_epsilon)


def describe_norm_from_one(norm: Any, plan: Any) -> Any:
    return plan.norm(1 + norm.weight.float(), eps=norm.eps)


CLASSES: dict[type, Callable[..., Any]] = {
    qwen3_next.Qwen3NextForCausalLM: describe_causal,
    qwen3_next.Qwen3NextModel: describe_backbone,
    qwen3_next.Qwen3NextRotaryEmbedding: describe_rotary,
    qwen3_next.Qwen3NextDecoderLayer: describe_layer,
    qwen3_next.Qwen3NextAttention: describe_attention,
    qwen3_next.Qwen3NextGatedDeltaNet: describe_qwen3_next_delta,
    qwen3_next.Qwen3NextMLP: describe_mlp,
    qwen3_next.Qwen3NextRMSNorm: describe_norm_from_one,
    qwen3_next.Qwen3NextRMSNormGated: describe_gated_norm,
    qwen3_5.Qwen3_5ForCausalLM: describe_causal,
    qwen3_5.Qwen3_5TextModel: describe_backbone,
    qwen3_5.Qwen3_5TextRotaryEmbedding: describe_rotary,
    qwen3_5.Qwen3_5DecoderLayer: describe_layer,
    qwen3_5.Qwen3_5Attention: describe_attention,
    qwen3_5.Qwen3_5GatedDeltaNet: describe_qwen3_5_delta,
    qwen3_5.Qwen3_5MLP: describe_mlp,
    qwen3_5.Qwen3_5RMSNorm: describe_norm_from_one,
    qwen3_5.Qwen3_5RMSNormGated: describe_gated_norm,
    olmo.OlmoHybridForCausalLM: describe_causal,
    olmo.OlmoHybridModel: describe_backbone,
    olmo.OlmoHybridRotaryEmbedding: describe_rotary,
    olmo.OlmoHybridLinearAttentionDecoderLayer: describe_olmo_linear,
    olmo.OlmoHybridAttentionDecoderLayer: describe_olmo_attention_layer,
    olmo.OlmoHybridAttention: describe_olmo_attention,
    olmo.OlmoHybridGatedDeltaNet: describe_olmo_delta,
    olmo.OlmoHybridMLP: describe_mlp,
    olmo.OlmoHybridRMSNorm: describe_norm,
    olmo.OlmoHybridRMSNormGated: describe_gated_norm,
    nn.Conv1d: describe_filters,
}
