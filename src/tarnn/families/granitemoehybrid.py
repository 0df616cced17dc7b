"""Granite 4 (IBM 2025): Mamba-2's mixers, softmax in some layers, and SwiGLU in all; most models have no positions.

Larger models (h-tiny, h-small) have experts beside it: the router's weights are the softmax of the chosen logits alone.

Four multipliers come with it, and cost nothing here. Every branch is added times r: divided by r, the residual stream
is e/r·embeddings + branches, and each norm of it the same as before with eps/r². Logits are divided in the last norm's gain.
"""

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.mamba2 import KINDS, Mamba2Sizes, mixer
from tarnn.families.parts import Heads, attention, dense, embed, head, kinds_of_layers, rms
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, product

WITHOUT_POSITIONS = ("nope", "")  # of position_embedding_type, besides null


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    config.choice("hidden_act", "silu")
    config.choice("normalization_function", "rmsnorm")
    config.skip("init_method", "num_experts_per_tok", "intermediate_size")
    has_experts = config.size("num_local_experts", 8, least=0) > 0
    experts = Experts.of(config, inner="intermediate_size", count="num_local_experts") if has_experts else None
    given, inner = config.number("rms_norm_eps", 1e-6, least=0), config.size("shared_intermediate_size", 1024)
    c, sizes = Mamba2Sizes.of_hybrid(config, hidden, given), Heads.of(config, hidden)
    branches, embeddings = (multiplier(config, f"{name}_multiplier") for name in ("residual", "embedding"))
    eps, scale = given / branches**2, config.number("attention_multiplier", 1.0)
    frequencies = rope_of(config, sizes.width).frequencies() if has_positions(config) else None
    bias = config.flag("attention_bias", False)
    x = embed(config, weights, hidden, scale=embeddings / branches)
    for i, kind in enumerate(kinds_of_layers(config, KINDS, ["mamba"] * layers, layers)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        if kind == "mixer":
            x = x + mixer(h, w.under("mamba."), c)
        else:
            x = x + attention(h, w.under("self_attn."), sizes, frequencies, bias=bias, scale=scale)
        h = rms(x, w, "post_attention_layernorm", eps)
        y = shared_mlp(h, w.under("shared_mlp."), inner)
        x = x + (y if experts is None else chosen_experts(h, w.under("block_sparse_moe."), experts) + y)
    x = rms(x, weights, "model.norm", eps, scale=1 / multiplier(config, "logits_scaling"))
    return head(x, config, weights)


def shared_mlp(x: Register, w: Weights, inner: int) -> Register:
    """Compute SwiGLU, whose first two products are one tensor."""
    gate, up = w.get("input_linear.weight", (2 * inner, x.size)).split(inner)
    y = apply(product(x, gate), "silu") * product(x, up)
    return dense(y, w, "output_linear", x.size)


def chosen_experts(x: Register, w: Weights, sizes: Experts) -> Register:
    """Compute the experts of each token. Folders have other names than a live model."""
    if "router.weight" in w:
        return sparse(x, w, sizes, router="router")
    return sparse(x, w, sizes, router="router.layer", whole=("input_linear.weight", "output_linear.weight"), under="")


def multiplier(config: Config, key: str) -> float:
    """Return a positive number."""
    return config.number(key, 1.0, least=1e-4, most=1e6)


def has_positions(config: Config) -> bool:
    """Return whether softmax rotates: `position_embedding_type` is "rope". Else what the config says of it does not count."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "rope", *WITHOUT_POSITIONS):
        config.refuse("position_embedding_type", kind, "'rope', 'nope' or null")
    if kind != "rope":
        config.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return bool(kind == "rope")
