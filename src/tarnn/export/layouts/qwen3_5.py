"""Gated DeltaNet, and softmax of all tokens, in the layout of Qwen3.5 (`tarnn.families.qwen3_5`).

Its norms multiply with 1 + w. Its softmax layers multiply their outputs with σ of a gate: zeros make that ½, which the
projection behind makes up for. A state per query head: keys that several queries share are repeated.

Readers count tokens by a layer with softmax. A model that has none gets one behind the others, of zeros, which adds nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.export.own import COUNTER, NORM, TOKENS, OwnModel, counting_layer, wide_enough

NAME = "Qwen3.5"
KINDS = {"gated_delta": "linear_attention", "softmax": "full_attention"}
EPS = 1e-6  # of norms within our layers
NO_DECAY = -200.0  # of a logarithm: e^−200 is zero in float32
UNMOVED = {"rope_type": "linear", "factor": 1e18}  # no position: angles so small that no number changes
LENGTH = 2**20  # positions, where the model has no limit


def check(model: OwnModel) -> None:
    """Raise UserError, with the names of all choices of the model that this layout lacks."""
    of_softmax = {"qk_norm": True} if "softmax" in model.kinds else {}
    known = {"position": ("none", "rotary"), "decay": ("none", "head", "token"), **of_softmax}
    model.check(NAME, KINDS, norm="rms", mlp="swiglu", bias=False, **known)


def prepared(model: OwnModel) -> OwnModel:
    """Return the model with norms that add what those of the layers add: the layout has one number for all."""
    return model.with_norm_eps(EPS)


def config(model: OwnModel) -> dict[str, Any]:
    """Return config.json."""
    r, kinds = model.record, [KINDS[kind] for kind in model.kinds]
    sizes = {"num_attention_heads": r.num_attention_heads, "num_key_value_heads": r.num_key_value_heads}
    sizes |= {"head_dim": r.head_dim}
    if "softmax" not in model.kinds:
        kinds, sizes = [*kinds, KINDS["softmax"]], COUNTER
    rope = {"rope_type": "default", "rope_theta": r.rotary_base, "partial_rotary_factor": 1.0}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": r.vocab_size,
        "hidden_size": r.hidden_size,
        "intermediate_size": r.intermediate_size,
        "num_hidden_layers": len(kinds),
        **sizes,
        "layer_types": kinds,
        **interval(kinds),
        "linear_num_key_heads": r.num_attention_heads,
        "linear_num_value_heads": r.num_attention_heads,
        "linear_key_head_dim": r.head_dim,
        "linear_value_head_dim": r.head_dim,
        "linear_conv_kernel_dim": max(2, model.options("gated_delta").get("filter_width", 4)),
        "hidden_act": "silu",
        "rms_norm_eps": r.norm_eps,
        "attention_bias": False,
        "rope_parameters": rope if r.position == "rotary" else rope | UNMOVED,
        "max_position_embeddings": r.max_position_embeddings or LENGTH,
        "tie_word_embeddings": r.tie_word_embeddings,
    }


def tensors(model: OwnModel) -> dict[str, Tensor]:
    """Return the weights by their names here."""
    renamed = {TOKENS: model.tensors[TOKENS], "model.norm.weight": model.tensors[f"{NORM}.weight"] - 1}
    if not model.record.tie_word_embeddings:
        renamed["lm_head.weight"] = model.head
    for i, kind in enumerate(model.kinds):
        w = model.layer(i)
        part = delta(w, model) if kind == "gated_delta" else softmax(w, model)
        part |= {f"mlp.{name}.weight": w[f"mlp.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")}
        part["input_layernorm.weight"] = w["attention_norm.weight"] - 1
        part["post_attention_layernorm.weight"] = w["mlp_norm.weight"] - 1
        renamed |= {f"model.layers.{i}.{name}": x for name, x in part.items()}
    if "softmax" not in model.kinds:
        layer = counting_layer(model, double_queries=True)
        layer |= {f"self_attn.{x}_norm.weight": torch.zeros(COUNTER["head_dim"]) for x in "qk"}
        renamed |= {f"model.layers.{len(model.kinds)}.{name}": x for name, x in layer.items()}
    return renamed


def interval(kinds: Sequence[str]) -> dict[str, int]:
    """Return `full_attention_interval` where the layers with softmax have one: some readers know no other pattern."""
    every = kinds.index(KINDS["softmax"]) + 1
    regular = all((kind == KINDS["softmax"]) == ((i + 1) % every == 0) for i, kind in enumerate(kinds))
    return {"full_attention_interval": every} if regular else {}


def delta(w: Mapping[str, Tensor], model: OwnModel) -> dict[str, Tensor]:
    """Return the tensors of a layer with the gated delta rule."""
    r = model.record
    h, g, d = r.num_attention_heads, r.num_key_value_heads, r.head_dim

    def repeated(x: Tensor) -> Tensor:
        """Rows of g heads as rows of h heads."""
        return x.unflatten(0, (g, -1)).repeat_interleave(h // g, 0).flatten(0, 1)

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([q, repeated(k), repeated(v)])

    filters = joined(*w["attention.filters"].split([h * d, g * d, g * d]))
    rows, bias, log_rate = decay(w, model)
    here = {
        "in_proj_qkv.weight": joined(*(w[f"attention.{name}_proj.weight"] for name in "qkv")),
        "in_proj_z.weight": w["attention.gate_proj.weight"],
        "in_proj_b.weight": repeated(w["attention.beta_proj.weight"]),
        "in_proj_a.weight": repeated(rows),
        "conv1d.weight": wide_enough(filters),
        "dt_bias": repeated(bias),
        "A_log": repeated(log_rate),
        "norm.weight": w["attention.norm.weight"],
        "out_proj.weight": w["attention.o_proj.weight"],
    }
    return {f"linear_attn.{name}": x for name, x in here.items()}


def decay(w: Mapping[str, Tensor], model: OwnModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows W (g, hidden), bias and A (g,) of log_decay = −e^A softplus(W x + bias)."""
    g, zeros = model.record.num_key_value_heads, w["attention.q_proj.weight"].new_zeros
    if model.record.decay == "token":
        return w["attention.decay.gate.weight"], w["attention.decay.bias"], zeros(g)
    of_one = zeros(g) + math.log(math.e - 1)  # softplus makes it 1
    if model.record.decay == "none":
        return zeros(g, model.record.hidden_size), of_one, zeros(g) + NO_DECAY
    rates = (-w["attention.decay.log_decay"]).log().clamp(min=NO_DECAY)
    return zeros(g, model.record.hidden_size), of_one, rates


def softmax(w: Mapping[str, Tensor], model: OwnModel) -> dict[str, Tensor]:
    """Return the tensors of a layer with softmax."""
    q = w["attention.q_proj.weight"].unflatten(0, (model.record.num_attention_heads, -1))
    here = {
        "q_proj.weight": torch.cat([q, torch.zeros_like(q)], 1).flatten(0, 1),
        "k_proj.weight": w["attention.k_proj.weight"],
        "v_proj.weight": w["attention.v_proj.weight"],
        "o_proj.weight": w["attention.o_proj.weight"] * 2,
        "q_norm.weight": w["attention.q_norm.weight"] - 1,
        "k_norm.weight": w["attention.k_norm.weight"] - 1,
    }
    return {f"self_attn.{name}": x for name, x in here.items()}
