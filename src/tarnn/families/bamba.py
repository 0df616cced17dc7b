"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2's mixers, softmax in some layers, and SwiGLU in all.

Half of a head is rotated, whatever the config says outside `rope_parameters`.
"""

from tarnn.families.config import Config
from tarnn.families.mamba2 import Mamba2Sizes, mixer
from tarnn.families.parts import Heads, attend, dense, head, kinds_of_layers, qkv, rms, swiglu, text_model
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program

KINDS = {x: x for x in ("linear_attention", "full_attention")} | {
    "mamba": "linear_attention",
    "attention": "full_attention",
}


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    record, hidden = text_model(config), config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("partial_rotary_factor", 0.5)
    config.skip("z_loss_coefficient", "num_logits_to_keep")
    eps, inner = config.number("rms_norm_eps", 1e-5, least=0), config.size("intermediate_size")
    c, sizes = Mamba2Sizes.of_hybrid(config, hidden, eps), Heads.of(config, hidden)
    frequencies = rope_of(config, sizes.width, partial=0.5).frequencies()
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    name = "model.embed_tokens.weight"
    x = record.embed(weights.get(name, (config.size("vocab_size"), hidden)))
    for i, kind in enumerate(layer_kinds(config)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        if kind == "linear_attention":
            x = x + mixer(h, w.under("mamba."), c)
        else:
            part = w.under("self_attn.")
            o = attend(*qkv(h, part, sizes, bias=bias), part, frequencies)
            x = x + dense(o, part, "o_proj", hidden, bias=bias)
        x = x + swiglu(rms(x, w, "pre_ff_layernorm", eps), w.under("feed_forward."), inner, bias=mlp_bias)
    done = head(rms(x, weights, "model.final_layernorm", eps), config, weights, name)
    config.check_all_taken()
    weights.check_all_taken()
    return done


def layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer. `attn_layer_indices` are those with softmax; another list must say the same."""
    layers, softmax = config.size("num_hidden_layers"), config.sizes("attn_layer_indices", [])
    kinds = ["full_attention" if i in softmax else "linear_attention" for i in range(layers)]
    if kinds_of_layers(config, KINDS, kinds, layers) != kinds:
        config.refuse("layer_types", config.get("layer_types"), "as attn_layer_indices says")
    return kinds
