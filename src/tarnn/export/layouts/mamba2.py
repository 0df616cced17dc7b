"""Mamba-2: layers without a feed-forward in its own layout, those with SwiGLU in Bamba's (`tarnn.families.mamba2`, `bamba`).

Readers of Bamba count tokens by a layer with softmax: there is one behind the others, of zeros, which adds nothing.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tarnn.errors import UserError
from tarnn.export.own import COUNTER, NORM, TOKENS, OwnModel, counting_layer, wide_enough

EPS = 1e-5  # of the norm within our layers
LENGTH = 2**20  # positions, where the model has no limit


def name_of(model: OwnModel) -> str:
    return "Mamba-2" if model.record.mlp == "none" else "Bamba"


def check(model: OwnModel) -> None:
    """Raise UserError, with the names of all choices of the model that the layout lacks."""
    name, r = name_of(model), model.record
    model.check(name, ("mamba2",), norm="rms", mlp=("none", "swiglu"), position=("none", "rotary"))
    if r.num_attention_heads * r.head_dim % r.hidden_size:
        raise UserError(
            f"{model.place}: the layout of {name} has heads that are together a multiple of hidden_size ({r.hidden_size}) "
            f"wide; got num_attention_heads = {r.num_attention_heads} of head_dim = {r.head_dim}."
        )


def prepared(model: OwnModel) -> OwnModel:
    """Return the model with norms that add what those of the layers add: the layout has one number for all."""
    return model.with_norm_eps(EPS)


def config(model: OwnModel) -> dict[str, Any]:
    """Return config.json."""
    r, options = model.record, model.options("mamba2")
    expand = r.num_attention_heads * r.head_dim // r.hidden_size
    state, taps = options.get("state_size", 64), max(2, options.get("filter_width", 4))
    shared = {
        "vocab_size": r.vocab_size,
        "hidden_size": r.hidden_size,
        "num_hidden_layers": r.num_hidden_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": r.tie_word_embeddings,
    }
    if r.mlp == "none":
        return shared | {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_heads": r.num_attention_heads,
            "head_dim": r.head_dim,
            "n_groups": 1,
            "state_size": state,
            "conv_kernel": taps,
            "expand": expand,
            "use_bias": r.bias,
            "use_conv_bias": True,
            "layer_norm_epsilon": r.norm_eps,
        }
    return shared | {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "intermediate_size": r.intermediate_size,
        **COUNTER,
        "num_hidden_layers": r.num_hidden_layers + 1,
        "attn_layer_indices": [r.num_hidden_layers],
        "mamba_n_heads": r.num_attention_heads,
        "mamba_d_head": r.head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": state,
        "mamba_d_conv": taps,
        "mamba_expand": expand,
        "mamba_proj_bias": r.bias,
        "mamba_conv_bias": True,
        "mlp_bias": r.bias,
        "rms_norm_eps": r.norm_eps,
        "max_position_embeddings": r.max_position_embeddings or LENGTH,
    }


def tensors(model: OwnModel) -> dict[str, Tensor]:
    """Return the weights by their names here."""
    alone = model.record.mlp == "none"
    tokens, last, first, mixer = (
        ("backbone.embeddings", "backbone.norm_f", "norm", "mixer")
        if alone
        else ("model.embed_tokens", "model.final_layernorm", "input_layernorm", "mamba")
    )
    renamed = {f"{tokens}.weight": model.tensors[TOKENS], f"{last}.weight": model.tensors[f"{NORM}.weight"]}
    if not model.record.tie_word_embeddings:
        renamed["lm_head.weight"] = model.head
    for i in range(model.record.num_hidden_layers):
        w = model.layer(i)
        part = {f"{mixer}.{name}": x for name, x in mixing(w).items()}
        part[f"{first}.weight"] = w["attention_norm.weight"]
        if not alone:
            part["pre_ff_layernorm.weight"] = w["mlp_norm.weight"]
            part |= {f"feed_forward.{x.removeprefix('mlp.')}": w[x] for x in w if x.startswith("mlp.")}
        start = "backbone" if alone else "model"
        renamed |= {f"{start}.layers.{i}.{name}": x for name, x in part.items()}
    if not alone:
        for name, x in counting_layer(model).items():
            name = name.replace("mlp.", "feed_forward.").replace("post_attention_", "pre_ff_")
            renamed[f"model.layers.{model.record.num_hidden_layers}.{name}"] = x
    return renamed


def mixing(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a mixer, which are ours in the same order."""
    renamed = {
        "conv1d.weight": wide_enough(w["attention.filters"]),
        "conv1d.bias": w["attention.filter_bias"],
        "norm.weight": w["attention.norm.weight"],
    }
    renamed |= {name: w[f"attention.{name}"] for name in ("dt_bias", "A_log", "D")}
    for ours, theirs in {"in_proj": "in_proj", "o_proj": "out_proj"}.items():
        renamed |= {f"{theirs}.{x}": w[y] for x in ("weight", "bias") if (y := f"attention.{ours}.{x}") in w}
    return renamed
