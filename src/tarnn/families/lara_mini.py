"""Lara-mini (Translated 2026): the gated delta rule, softmax over a window, and softmax over all tokens; experts in all layers.

Layers with a window are rotated; those that see all tokens have no positions. Beside its experts a token has one that all share,
without a gate. Folders hold the delta rule's projections in one tensor, of rows [q | k | v | z | b | a]; a live model in four.
"""

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.gated_delta import DeltaSizes, Gates, gated_delta
from tarnn.families.lfm3 import Attention, attention
from tarnn.families.parts import Heads, dense, embed, head, rms, swiglu
from tarnn.families.qwen3_5 import projections
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, product

LINEAR, WINDOW, FULL = "linear_attention", "sliding_attention", "full_attention"
TURNS = (LINEAR, WINDOW, LINEAR, FULL, WINDOW)


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    config.choice("hidden_act", "silu")
    eps, sizes = config.number("rms_norm_eps", 1e-6, least=0), DeltaSizes.of(config, 8, 16, 128, 128)
    experts = Experts.of(config, inner="moe_intermediate_size", normalize=config.flag("norm_topk_prob", True))
    shared = config.size("shared_expert_intermediate_size")
    attentions = attentions_of(config, hidden, eps)
    x = embed(config, weights, hidden)
    turns = [TURNS[i % len(TURNS)] for i in range(layers)]
    for i, kind in enumerate(config.choices("layer_types", *sorted(set(TURNS)), default=turns, length=layers)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        if kind == LINEAR:
            part, state = w.under("linear_attn."), x.record.state("GatedDeltaState")
            norm = "out_norm" if "out_norm.weight" in part else "norm"  # in folders; in a live model
            o = gated_delta(h, *projected(h, part, sizes), part, sizes, state, norm_name=norm, eps=eps)
            x = x + dense(o, part, "out_proj", hidden)
        else:
            x = x + attention(h, w.under("self_attn."), attentions[kind])
        h, part = rms(x, w, "post_attention_layernorm", eps), w.under("mlp.")
        x = x + (sparse(h, part, experts) + swiglu(h, part.under("shared_expert."), shared))
    tied = config.flag("tie_word_embeddings", True)
    return head(rms(x, weights, "model.norm", eps), config, weights, tied=tied)


def attentions_of(config: Config, hidden: int, eps: float) -> dict[str, Attention]:
    """Read softmax attention of both kinds of layers."""
    config.size("num_key_value_heads")  # it is no multiple of another size where it is absent
    heads, bias, window = (
        Heads.of(config, hidden, 128),
        config.flag("attention_bias", False),
        config.size("sliding_window", 512),
    )
    rope = rope_of(config, heads.width)
    if rope.rotary_dim != heads.width:
        config.refuse("partial_rotary_factor", rope.rotary_dim / heads.width, "1 (whole heads are rotated)")
    return {
        WINDOW: Attention(heads, eps, rope.frequencies(), window, bias, gated=False),
        FULL: Attention(heads, eps, None, None, bias, gated=False),
    }


def projected(x: Register, w: Weights, sizes: DeltaSizes) -> tuple[Register, Gates]:
    """Record q, k and v of a layer, and return the rows that gate it."""
    if "in_proj.weight" not in w:
        return projections(x, w, sizes)
    parts = (sizes.channels, sizes.all_values, sizes.values, sizes.values)
    qkv, z, b, a = w.get("in_proj.weight", (sum(parts), x.size)).split(parts)
    return product(x, qkv), Gates(z, b, a)
