"""Ling and Ring 3 (bailing_hybrid): delta attention with bounded decays per channel, and latent attention with gates per head.

The first layers have a dense MLP, the others experts. Layers for several tokens at once, behind the others, are left.
"""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from tarnn.families.channel_delta import ChannelDelta
from tarnn.families.config import Config
from tarnn.families.experts import named
from tarnn.families.grouped_experts import mlps
from tarnn.families.kimi_linear import MIXERS, all_layers
from tarnn.families.latent import LatentSizes, latent_attention
from tarnn.families.parts import EMBEDDINGS, dense, embed, head
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, heads

RELEASED = "model.word_embeddings.weight"


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder. Released ones have names of their own for some tensors."""
    layers, eps = config.size("num_hidden_layers"), config.number("rms_norm_eps", 1e-6, least=0)
    check_options(config)
    latent = LatentSizes.of(config)
    linear, kinds = linear_layers(config, layers, latent, eps)
    frequencies = rope_of(config, latent.turned, theta=6e6).frequencies()
    mlp = mlps(config, layers, 2, (512, 8), (8, 4), 2.5)
    name = RELEASED if RELEASED in weights else EMBEDDINGS
    mixers = linear.mix, partial(gated_latent, sizes=latent, frequencies=frequencies)
    x = embed(config, weights, config.size("hidden_size"), name)
    x = all_layers(x, weights, eps, kinds, mixers, mlp, latent.bias)
    more = config.size(named(config, "num_nextn_predict_layers", "num_mtp_layers"), 1, least=0)
    left = [f"model.layers.{i}.*" for i in range(layers, layers + min(more, 99))]
    return head(x, config, weights, name, tied=False, may_leave=left)


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
