"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692): delta attention with a decay per channel, latent attention without positions.

The first layers have a dense MLP, the others experts.
"""

from tarnn.families.channel_delta import ChannelDelta
from tarnn.families.config import Config
from tarnn.families.grouped_experts import GroupedExperts
from tarnn.families.latent import LatentSizes, latent_attention
from tarnn.families.parts import dense, head, rms, swiglu, text_model
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program

MIXERS = ("linear_attention", "full_attention")
MLPS = ("dense", "sparse")
UNUSED = ("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "linear_attn_config", "auto_map")


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    record, hidden, layers = text_model(config), config.size("hidden_size"), config.size("num_hidden_layers")
    eps, inner, latent = (
        config.number("rms_norm_eps", 1e-5, least=0),
        config.size("intermediate_size"),
        LatentSizes.of(config),
    )
    check_options(config)
    linear, mixers = linear_layers(config, layers, eps)
    mlps = mlp_layers(config, layers, dense_by_default=1)
    mixture = GroupedExperts.of(config, 256, (1, 1), 2.446)
    name = "model.embed_tokens.weight"
    x = record.embed(weights.get(name, (config.size("vocab_size"), hidden)))
    for i in range(layers):
        w = weights.under(f"model.layers.{i}.")
        h, part = rms(x, w, "input_layernorm", eps), w.under("self_attn.")
        if mixers[i] == "linear_attention":
            x = x + dense(linear.mix(h, part, record.state("GatedDeltaState")), part, "o_proj", hidden)
        else:
            x = x + dense(latent_attention(h, part, latent), part, "o_proj", hidden, bias=latent.bias)
        h = rms(x, w, "post_attention_layernorm", eps)
        part = w.under("mlp.")
        if "gate.weight" not in part and "gate_proj.weight" not in part:
            part = w.under("block_sparse_moe.")  # which transformers writes for dense layers, too
        x = x + (swiglu(h, part, inner) if mlps[i] == "dense" else mixture.mix(h, part))
    done = head(rms(x, weights, "model.norm", eps), config, weights, name, tied=False)
    config.check_all_taken()
    weights.check_all_taken()
    return done


def check_options(config: Config) -> None:
    """Refuse what released models do not have."""
    config.choice("hidden_act", "silu")
    config.choice("mla_use_nope", True)
    config.choice("moe_router_activation_func", "sigmoid")
    config.choice("moe_layer_freq", 1)
    config.choice("use_grouped_topk", True)
    config.choice("num_nextn_predict_layers", 0)
    config.choice("tie_word_embeddings", False)
    config.skip(*UNUSED)


def linear_layers(config: Config, layers: int, eps: float) -> tuple[ChannelDelta, tuple[str, ...]]:
    """Read the sizes of delta attention and what each layer has. Released folders count layers from 1, in an object."""
    inner = config.inner("linear_attn_config")
    kinds = [MIXERS[i > 0 and i % 4 == 0] for i in range(layers)]
    if "full_attn_layers" in inner and "kda_layers" in inner:
        full = inner.sizes("full_attn_layers", least=1)
        kinds = [MIXERS[i + 1 in full] for i in range(layers)]
        others = sorted(set(range(1, layers + 1)) - set(full))
        if sorted(inner.sizes("kda_layers", least=1)) != others or max((0, *full)) > layers:
            inner.refuse("kda_layers", inner.get("kda_layers"), f"the layers that are not full_attn_layers, {others}")
    sizes = ChannelDelta(
        inner.size("num_heads", config.size("linear_num_heads", 32)),
        inner.size("head_dim", config.size("linear_head_dim", 128)),
        inner.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4, least=2), least=2),
        eps,
        pairs=True,
    )
    return sizes, config.choices("layer_types", *MIXERS, default=kinds, length=layers)


def mlp_layers(config: Config, layers: int, *, dense_by_default: int) -> tuple[str, ...]:
    """Return what each layer has behind its attention: the first `first_k_dense_replace` are dense, unless they are listed."""
    first = config.size("first_k_dense_replace", dense_by_default, least=0)
    default = [MLPS[i >= first] for i in range(layers)]
    return config.choices("mlp_layer_types", *MLPS, default=default, length=layers)
