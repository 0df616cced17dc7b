"""LFM2 with experts (LFM2-8B-A1B): LFM2's layers; the first have a SwiGLU, the others experts of a router of sigmoids."""

from typing import Any

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.lfm2 import attention, gated_convolution, layer_types
from tarnn.families.parts import LFM, Heads, embed, head, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, eps = config.size("hidden_size"), config.number("norm_eps", 1e-5, least=0)
    heads, layers = Heads.of(config, hidden), config.size("num_hidden_layers")
    frequencies = rope_of(config, heads.width, theta=1e6).frequencies()
    taps, bias = config.size("conv_L_cache", 3), config.flag("conv_bias", False)
    inner, dense = config.size("intermediate_size"), config.size("num_dense_layers", 2, least=0)
    normalize, scale = config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0)
    routing: dict[str, Any] = {"scores": "sigmoid", "normalize": normalize, "eps": 1e-6, "scale": scale}
    experts = Experts.of(config, inner="moe_intermediate_size", **routing)
    offset = "expert_bias" if config.flag("use_expert_bias", True) else None
    x = embed(config, weights, hidden)
    for i, kind in enumerate(layer_types(config, layers)):
        w = weights.under(f"model.layers.{i}.")
        h, ff = rms(x, w, "operator_norm", eps), w.under("feed_forward.")
        if kind == "conv":
            x = x + gated_convolution(h, w.under("conv."), taps, bias)
        else:
            x = x + attention(h, w.under("self_attn."), heads, eps, frequencies)
        h = rms(x, w, "ffn_norm", eps)
        x = x + (swiglu(h, ff, inner, names=LFM) if i < dense else sparse(h, ff, experts, bias=offset, names=LFM))
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    return head(rms(x, weights, "model.embedding_norm", eps), config, weights, tied=tied)
