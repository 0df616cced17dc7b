"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624), Nemotron 3: Mamba-2's mixers, softmax without positions, and MLPs in turns.

Each layer has one of them behind a norm. Δ is at least `time_step_min`, in prompts and in steps. An MLP is W relu(V x)²; layers
of experts have several, without gates, beside one that all tokens share. Experts may read and write rows of a latent size.
"""

from collections.abc import Callable
from typing import Any

from tarnn.families.config import Config
from tarnn.families.experts import grouped, sparse
from tarnn.families.mamba2 import Mamba2Sizes, mixer
from tarnn.families.parts import Heads, attention, dense, embed, head, kinds_of_layers, rms
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply

KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
FUNCTIONS = {"relu2": "squared_relu", "silu": "silu", "gelu": "gelu"}
OF_EXPERTS = ("*routed*", "moe_*", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob")
CHANGES_NOTHING = (  # transformers does not read them
    *("chunk_size", "expand", "num_logits_to_keep", "num_query_groups", "mamba_proj_bias", "mamba_ssm_cache_dtype"),
    *(
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "rms_norm_eps",
        "norm_eps",
        "rope_theta",
        "partial_rotary_factor",
    ),
    *("time_step_floor", "time_step_max", "time_step_rank", "use_mamba_kernels", "moe_shared_expert_overlap"),
)
OF_DRAFTS = ("mtp_*", "num_nextn_predict_layers")


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("mamba_hidden_act", "silu")
    config.choice("sliding_window", None)
    config.choice("attention_bias", False)
    eps, inner = config.number("layer_norm_epsilon", 1e-5, least=0), config.size("intermediate_size", 21504)
    function, bias = FUNCTIONS[config.choice("mlp_hidden_act", *FUNCTIONS)], config.flag("mlp_bias", False)
    c, sizes = mixer_sizes(config, eps), Heads.of(config, hidden, 128)
    config.choice("attention_head_dim", sizes.width)
    prefix = "model." if "model.embeddings.weight" in weights else "backbone."  # of a live model; in folders
    name = f"{prefix}embeddings.weight"
    x = embed(config, weights, hidden, name)
    kinds = layer_kinds(config)
    experts = experts_of_layer(config, function, bias) if "E" in kinds else None
    for i, kind in enumerate(kinds):
        w = weights.under(f"{prefix}layers.{i}.")
        h, part = rms(x, w, "norm", eps), w.under("mixer.")
        if kind == "M":
            x = x + mixer(h, part, c)
        elif kind == "*":
            x = x + attention(h, part, sizes)
        elif experts is not None and kind == "E":
            x = x + experts(h, part)
        else:
            x = x + mlp(h, part, inner, function, bias)
    tied = config.choice("tie_word_embeddings", False)
    return head(
        rms(x, weights, f"{prefix}norm_f", eps),
        config,
        weights,
        name,
        tied=tied,
        harmless=(*CHANGES_NOTHING, *(OF_EXPERTS if experts is None else ()), *OF_DRAFTS, "auto_map"),
        may_leave=("mtp.*",),
    )


def mixer_sizes(config: Config, eps: float) -> Mamba2Sizes:
    """Return the sizes of the mixers."""
    n, bias = config.size("mamba_num_heads", 128), config.flag("use_bias", False)
    keys, filter_bias = (("n_groups", 8), ("ssm_state_size", 128), "conv_kernel"), config.flag("use_conv_bias", True)
    sizes = Mamba2Sizes.read(config, n, config.size("mamba_head_dim", 64), *keys, eps, bias, filter_bias)
    return sizes.with_least_step(config)


def layer_kinds(config: Config) -> list[str]:
    """Return what each layer has, as lists of names or `hybrid_override_pattern` say: M, *, - or E for experts."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        kinds = kinds_of_layers(config, KINDS, None)
    elif not isinstance(pattern, str) or not pattern or set(pattern) - set(KINDS.values()):
        config.refuse("hybrid_override_pattern", pattern, "a text of M, *, - and E")
    else:
        names = {letter: name for name, letter in KINDS.items()}
        kinds = kinds_of_layers(config, KINDS, [names[x] for x in pattern], len(pattern))
        if kinds != list(pattern):
            config.refuse("hybrid_override_pattern", pattern, f"{''.join(kinds)!r}, as the list of layers says,")
    config.choice("num_hidden_layers", len(kinds))
    return kinds


def mlp(x: Register, w: Weights, inner: int, function: str, bias: bool) -> Register:
    """Compute down(f(up x))."""
    return dense(apply(dense(x, w, "up_proj", inner, bias=bias), function), w, "down_proj", x.size, bias=bias)


def experts_of_layer(config: Config, function: str, bias: bool) -> Callable[[Register, Weights], Register]:
    """Return what computes a layer of experts. bias: of the shared MLP and of the projections to and from the latent size."""
    sizes = grouped(config, "n_routed_experts")
    shared, latent = config.size("moe_shared_expert_intermediate_size", 7688), config.size("moe_latent_size", None)
    config.choice("n_shared_experts", 1)
    layout: dict[str, Any] = {
        "bias": "gate.e_score_correction_bias",
        "names": ("up_proj", "down_proj"),
        "function": function,
    }

    def compute(x: Register, w: Weights) -> Register:
        if latent is None:
            y = sparse(x, w, sizes, **layout)
        else:
            inputs = dense(x, w, "fc1_latent_proj", latent, bias=bias)
            y = dense(sparse(x, w, sizes, inputs=inputs, **layout), w, "fc2_latent_proj", x.size, bias=bias)
        return y + mlp(x, w.under("shared_experts."), shared, function, bias)

    return compute
