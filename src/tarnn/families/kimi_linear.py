"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692): delta attention with a decay per channel, latent attention without positions.

The first layers have a dense MLP, the others experts.
"""

from collections.abc import Callable, Sequence
from functools import partial

from tarnn.families.channel_delta import ChannelDelta
from tarnn.families.config import Config
from tarnn.families.grouped_experts import Mlp, mlps
from tarnn.families.latent import LatentSizes, latent_attention
from tarnn.families.parts import dense, embed, head, rms
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register

MIXERS = ("linear_attention", "full_attention")
OLD = "block_sparse_moe."
Mixer = Callable[[Register, Weights], Register]
UNUSED = ("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "linear_attn_config", "auto_map")


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    layers, eps = config.size("num_hidden_layers"), config.number("rms_norm_eps", 1e-5, least=0)
    check_options(config)
    (linear, kinds), latent = linear_layers(config, layers, eps), LatentSizes.of(config)
    mlp = mlps(config, layers, 1, (256, 8), (1, 1), 2.446)
    mixers = linear.mix, partial(latent_attention, sizes=latent)
    x = all_layers(embed(config, weights, config.size("hidden_size")), weights, eps, kinds, mixers, mlp, latent.bias)
    return head(x, config, weights, tied=False)


def all_layers(
    x: Register, weights: Weights, eps: float, kinds: Sequence[str], mixers: tuple[Mixer, Mixer], mlp: Mlp, bias: bool
) -> Register:
    """Record x + f(norm x) twice in each layer, then the last norm. mixers: of both `MIXERS`; bias: of the second's product."""
    for i, kind in enumerate(kinds):
        w, full = weights.under(f"model.layers.{i}."), kind == MIXERS[1]
        h, ling = rms(x, w, "input_layernorm", eps), "attention.dense.weight" in w
        part, out = w.under("attention." if ling else "self_attn."), "dense" if ling else "o_proj"
        x = x + dense(mixers[full](h, part), part, out, x.size, bias=bias and full)
        h = rms(x, w, "post_attention_layernorm", eps)
        old = any(f"{OLD}{name}.weight" in w for name in ("gate", "gate_proj"))  # also where transformers wrote them
        x = x + mlp(i, h, w.under(OLD if old else "mlp."))
    return rms(x, weights, "model.norm", eps)


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
