"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2's mixers, softmax in some layers, and SwiGLU in all.

Half of a head is rotated, whatever the config says outside `rope_parameters`.
"""

from tarnn.families.config import Config
from tarnn.families.mamba2 import KINDS, Mamba2Sizes, mixer
from tarnn.families.parts import Heads, attention, embed, head, kinds_of_layers, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("partial_rotary_factor", 0.5)
    config.skip("z_loss_coefficient", "num_logits_to_keep")
    eps, inner = config.number("rms_norm_eps", 1e-5, least=0), config.size("intermediate_size")
    c, sizes = Mamba2Sizes.of_hybrid(config, hidden, eps), Heads.of(config, hidden)
    frequencies = rope_of(config, sizes.width, partial=0.5).frequencies()
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    x = embed(config, weights, hidden)
    for i, kind in enumerate(layer_kinds(config)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        if kind == "mixer":
            x = x + mixer(h, w.under("mamba."), c)
        else:
            x = x + attention(h, w.under("self_attn."), sizes, frequencies, bias=bias)
        x = x + swiglu(rms(x, w, "pre_ff_layernorm", eps), w.under("feed_forward."), inner, bias=mlp_bias)
    return head(rms(x, weights, "model.final_layernorm", eps), config, weights)


def layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer. `attn_layer_indices` are those with softmax; another list must say the same."""
    layers, softmax = config.size("num_hidden_layers"), config.sizes("attn_layer_indices", [])
    names = ["attention" if i in softmax else "mamba" for i in range(layers)]
    kinds = kinds_of_layers(config, KINDS, names, layers)
    if kinds != [KINDS[x] for x in names]:
        config.refuse("layer_types", config.get("layer_types"), "as attn_layer_indices says")
    return kinds
