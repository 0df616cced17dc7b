"""Ling and Ring 3 (bailing_hybrid): delta attention with bounded decays per channel, and latent attention with gates per head.

The first layers have a dense MLP, the others experts. Layers for several tokens at once, behind the others, are left.
"""

from jaxtyping import Float
from torch import Tensor

from tarnn.families.channel_delta import ChannelDelta
from tarnn.families.config import Config
from tarnn.families.grouped_experts import GroupedExperts, named
from tarnn.families.kimi_linear import MIXERS, mlp_layers
from tarnn.families.latent import LatentSizes, latent_attention
from tarnn.families.parts import dense, head, rms, swiglu, text_model
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, heads


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder. Released ones have names of their own for some tensors."""
    record, hidden, layers = text_model(config), config.size("hidden_size"), config.size("num_hidden_layers")
    eps, inner, latent = (
        config.number("rms_norm_eps", 1e-6, least=0),
        config.size("intermediate_size"),
        LatentSizes.of(config),
    )
    check_options(config)
    linear, mixers = linear_layers(config, layers, latent, eps)
    frequencies = rope_of(config, latent.turned, theta=6e6).frequencies()
    mlps = mlp_layers(config, layers, dense_by_default=2)
    mixture = GroupedExperts.of(config, 512, (8, 4), 2.5)
    name = "model.word_embeddings.weight" if "model.word_embeddings.weight" in weights else "model.embed_tokens.weight"
    x = record.embed(weights.get(name, (config.size("vocab_size"), hidden)))
    for i in range(layers):
        w = weights.under(f"model.layers.{i}.")
        h, released = rms(x, w, "input_layernorm", eps), "attention.dense.weight" in w
        part, out = w.under("attention." if released else "self_attn."), "dense" if released else "o_proj"
        if mixers[i] == "linear_attention":
            x = x + dense(linear.mix(h, part, record.state("GatedDeltaState")), part, out, hidden)
        else:
            x = x + dense(gated_latent(h, part, latent, frequencies), part, out, hidden, bias=latent.bias)
        h = rms(x, w, "post_attention_layernorm", eps)
        x = x + (swiglu(h, w.under("mlp."), inner) if mlps[i] == "dense" else mixture.mix(h, w.under("mlp.")))
    done = head(rms(x, weights, "model.norm", eps), config, weights, name, tied=False)
    more = config.size(named(config, "num_nextn_predict_layers", "num_mtp_layers"), 1, least=0)
    config.check_all_taken()
    weights.check_all_taken(*(f"model.layers.{i}.*" for i in range(layers, layers + min(more, 99))))
    return done


def check_options(config: Config) -> None:
    """Refuse what released models do not have."""
    config.choice("hidden_act", "silu")
    config.choice("score_function", "sigmoid")
    config.choice("moe_router_enable_expert_bias", True)
    config.choice("use_bias", False)
    config.choice("use_qkv_bias", False)
    config.choice("tie_word_embeddings", False)
    config.skip("mtp_loss_scaling_factor", "router_dtype", "auto_map")


def linear_layers(config: Config, layers: int, latent: LatentSizes, eps: float) -> tuple[ChannelDelta, tuple[str, ...]]:
    """Read the sizes of delta attention and what each layer has."""
    safe, least = config.flag("kda_safe_gate", True), config.number("kda_lower_bound", -5.0, least=-80, most=0)
    width = config.size("head_dim", 128)
    taps = config.size("short_conv_kernel_size", 4, least=2)
    sizes = ChannelDelta(
        config.size("linear_num_heads", latent.heads),
        config.size("linear_head_dim", width),
        config.size("linear_conv_kernel_dim", taps, least=2),
        eps,
        least if safe else None,
    )
    group = config.size("layer_group_size", 6)
    kinds = [MIXERS[(i + 1) % group == 0] for i in range(layers)]
    return sizes, config.choices("layer_types", *MIXERS, default=kinds, length=layers)


def gated_latent(x: Register, w: Weights, sizes: LatentSizes, frequencies: Float[Tensor, " p"]) -> Register:
    """Attend; outputs times a gate per head."""
    o = latent_attention(x, w, sizes, frequencies)
    return o * heads(apply(dense(x, w, "g_proj", sizes.heads), "sigmoid"), sizes.heads)
