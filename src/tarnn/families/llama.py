"""Llama, Mistral, Qwen2 and Qwen3: softmax over all tokens with rotary positions, then SwiGLU, each behind an RMS norm.

Touvron et al. 2023 (arXiv 2302.13971). Qwen2 has biases on q, k and v, Qwen3 norms of each head of q and k.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.parts import Heads, attend, dense, embed, head, qkv, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register


@dataclass(frozen=True)
class LlamaLayer:
    """Numbers that all layers share."""

    heads: Heads
    inner: int
    eps: float
    frequencies: Float[Tensor, " p"]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_norms: bool

    @classmethod
    def of(cls, config: Config, hidden: int) -> "LlamaLayer":
        family = config.choice("model_type", "llama", "mistral", "qwen2", "qwen3")
        sizes = Heads.of(config, hidden, 128 if family == "qwen3" else None)
        bias = config.flag("attention_bias", False) if family in ("llama", "qwen3") else False
        return cls(
            heads=sizes,
            inner=config.size("intermediate_size"),
            eps=config.number("rms_norm_eps", 1e-6, least=0),
            frequencies=rope_of(config, sizes.width).frequencies(),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=config.flag("mlp_bias", False) if family == "llama" else False,
            head_norms=family == "qwen3",
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_act", "silu")
    c = LlamaLayer.of(config, hidden)
    x = embed(config, weights, hidden, limit=window(config))
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", c.eps)
        x = x + attention(h, w.under("self_attn."), c)
        h = rms(x, w, "post_attention_layernorm", c.eps)
        x = x + swiglu(h, w.under("mlp."), c.inner, bias=c.mlp_bias)
    return head(rms(x, weights, "model.norm", c.eps), config, weights)


def attention(x: Register, w: Weights, c: LlamaLayer) -> Register:
    q, k, v = qkv(x, w, c.heads, bias=c.qkv_bias)
    if c.head_norms:
        q, k = rms(q, w, "q_norm", c.eps), rms(k, w, "k_norm", c.eps)
    return dense(attend(q, k, v, w, c.frequencies), w, "o_proj", x.size, bias=c.o_bias)


def window(config: Config) -> int | None:
    """Return the number of positions up to which all tokens are seen; None: any. Refuse windows that matter."""
    if config.model_type == "mistral":
        size, longest = config.size("sliding_window", None), config.size("max_position_embeddings", None)
        if size is not None and (longest is None or size < longest):
            config.refuse("sliding_window", size, "null, as in models whose tokens see all before them,")
        return size
    if config.model_type in ("qwen2", "qwen3"):
        config.choice("use_sliding_window", False)
        config.choice("use_mrope", False)
        config.skip("sliding_window", "max_window_layers")
        layers = config.size("num_hidden_layers")
        config.choices("layer_types", "full_attention", default=["full_attention"] * layers, length=layers)
    return None
