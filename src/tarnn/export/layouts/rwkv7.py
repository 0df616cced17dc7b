"""RWKV-7 with a feed-forward of relu², in the layout of fla (`tarnn.families.rwkv7`).

Two things that its layers do are done by nothing here: the mixture with the first layer's values has weight σ(−200) = 0, and
that of the feed-forward with the token before has weight 0. Embeddings are not normed (norm_first false).
"""

from typing import Any

from torch import Tensor

from tarnn.attention.rwkv7 import NORM_EPS
from tarnn.attention.rwkv7_layer import low_ranks
from tarnn.errors import UserError
from tarnn.export.own import NORM, TOKENS, OwnModel

NAME = "RWKV-7"
RANK, NEVER = 32, -200.0  # of the mixture with the first layer's values: its rank, and its logit
LENGTH = 2**20  # positions, where the model has no limit
MATRICES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
LOW_RANK = {"1": "0.weight", "2": "2.weight", "0": "2.bias"}


def check(model: OwnModel) -> None:
    """Raise UserError, with the names of all choices of the model that this layout lacks."""
    r = model.record
    model.check(NAME, ("rwkv7",), norm="layer", mlp="squared_relu", bias=False, position=("none", "rotary"))
    if r.num_attention_heads * r.head_dim != r.hidden_size:
        raise UserError(
            f"{model.place}: the layout of {NAME} has heads that are together as wide as hidden_size ({r.hidden_size}); got "
            f"num_attention_heads = {r.num_attention_heads} of head_dim = {r.head_dim}."
        )


def prepared(model: OwnModel) -> OwnModel:
    """Return the model with norms that add what those of heads add, divided by the width: the layout has one number for both."""
    return model.with_norm_eps(NORM_EPS / model.record.head_dim)


def config(model: OwnModel) -> dict[str, Any]:
    """Return config.json."""
    r = model.record
    ranks = low_ranks(r.hidden_size)
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "vocab_size": r.vocab_size,
        "hidden_size": r.hidden_size,
        "intermediate_size": r.intermediate_size,
        "num_hidden_layers": r.num_hidden_layers,
        "num_heads": r.num_attention_heads,
        "head_dim": r.head_dim,
        "value_dim": [r.hidden_size] * r.num_hidden_layers,
        "decay_low_rank_dim": ranks["w"],
        "a_low_rank_dim": ranks["a"],
        "gate_low_rank_dim": ranks["g"],
        "v_low_rank_dim": RANK,
        "attn": None,
        "attn_mode": "chunk",
        "hidden_act": "sqrelu",
        "norm_first": False,
        "norm_bias": True,
        "norm_eps": r.norm_eps,
        "max_position_embeddings": r.max_position_embeddings or LENGTH,
        "tie_word_embeddings": False,
    }


def tensors(model: OwnModel) -> dict[str, Tensor]:
    """Return the weights by their names here. Embeddings that are the output layer too are there twice."""
    renamed = {"model.embeddings.weight": model.tensors[TOKENS], "lm_head.weight": model.head}
    renamed |= {f"model.norm.{x}": model.tensors[f"{NORM}.{x}"] for x in ("weight", "bias")}
    for i in range(model.record.num_hidden_layers):
        w = model.layer(i)
        part = {f"attn.{name}": x for name, x in mixing(w, i).items()}
        part |= {f"attn_norm.{x}": w[f"attention_norm.{x}"] for x in ("weight", "bias")}
        part |= {f"ffn_norm.{x}": w[f"mlp_norm.{x}"] for x in ("weight", "bias")}
        part |= {"ffn.key.weight": w["mlp.up_proj.weight"], "ffn.value.weight": w["mlp.down_proj.weight"]}
        part["ffn.x_k"] = w["attention_norm.weight"].new_zeros(model.record.hidden_size)
        renamed |= {f"model.layers.{i}.{name}": x for name, x in part.items()}
    return renamed


def mixing(w: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return the tensors of the layer between tokens."""
    ours = {name.removeprefix("attention.mixing."): x for name, x in w.items() if name.startswith("attention.mixing.")}
    renamed = {f"x_{name}": x[None] for name, x in zip("rwkvag", ours["x_rwkvag"], strict=True)}
    renamed |= {name: ours[name].flatten() for name in ("k_k", "k_a")} | {"r_k": ours["r_k"]}
    renamed |= {f"{theirs}.weight": ours[f"{name}.weight"] for name, theirs in MATRICES.items()}
    renamed |= {f"g_norm.{x}": ours[f"ln_x.{x}"] for x in ("weight", "bias")}
    for name in "wag":
        low = {f"{name}_lora.lora.{theirs}": ours.get(f"{name}{i}") for i, theirs in LOW_RANK.items()}
        renamed |= {key: x.squeeze() if x.ndim == 3 else x for key, x in low.items() if x is not None}
    if layer:
        zeros, width = ours["x_rwkvag"].new_zeros, ours["r_k"].numel()
        renamed["v_lora.lora.0.weight"] = zeros(RANK, ours["x_rwkvag"].shape[-1])
        renamed["v_lora.lora.2.weight"] = zeros(width, RANK)
        renamed["v_lora.lora.2.bias"] = zeros(width) + NEVER
    return renamed
