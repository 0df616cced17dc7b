"""LFM3 (Liquid AI): LFM2's gated convolutions, softmax over a window in some layers, and over all tokens in others."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.lfm2 import gated_convolution
from tarnn.families.parts import LFM, Heads, attend, dense, embed, head, qkv, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.hybrid import hybrid
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, rotate


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one kind of layers. window: tokens that are seen; None: all. gated: a number per head.

    frequencies: of the rotation; None: there is none.
    """

    heads: Heads
    eps: float
    frequencies: Float[Tensor, " p"] | None
    window: int | None
    bias: bool
    gated: bool

    @classmethod
    def of(cls, config: Config, kind: str, hidden: int, eps: float) -> "Attention":
        sizes, window = Heads.of(config, hidden, 128), config.size("sliding_window", 256)
        own = {"theta": 1e4} if kind == "sliding_attention" else {"theta": 1e6, "partial": 0.5, "kind": "proportional"}
        return cls(
            heads=sizes,
            eps=eps,
            frequencies=rope_of(config, sizes.width, layer_type=kind, **own).frequencies(),
            window=window if kind == "sliding_attention" else None,
            bias=config.flag("attention_bias", False),
            gated=config.flag("use_attention_gate", True),
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, eps = config.size("hidden_size"), config.number("norm_eps", 1e-5, least=0)
    inner, layers = config.size("intermediate_size", 7680), config.size("num_hidden_layers", 24)
    taps, bias = config.size("conv_L_cache", 7), config.flag("conv_bias", False)
    sandwich = config.flag("use_sandwich_norm", True)
    kinds = layer_types(config, layers)
    attentions = {kind: Attention.of(config, kind, hidden, eps) for kind in ("full_attention", "sliding_attention")}
    x = embed(config, weights, hidden)
    for i, kind in enumerate(kinds):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "operator_norm", eps)
        if kind == "conv":
            h = gated_convolution(h, w.under("conv."), taps, bias)
        else:
            h = attention(h, w.under("self_attn."), attentions[kind])
        x = x + (rms(h, w, "post_operator_norm", eps) if sandwich else h)
        h = swiglu(rms(x, w, "ffn_norm", eps), w.under("feed_forward."), inner, names=LFM)
        x = x + (rms(h, w, "post_ffn_norm", eps) if sandwich else h)
    tied = config.flag("tie_word_embeddings", True)
    return head(rms(x, weights, "model.embedding_norm", eps), config, weights, tied=tied)


def attention(x: Register, w: Weights, c: Attention) -> Register:
    """Write softmax over all tokens, or over the last ones, with a gate σ(g x) of each head's output."""
    q, k, v = qkv(x, w, c.heads, bias=c.bias)
    q, k = rms(q, w, "q_norm", c.eps), rms(k, w, "k_norm", c.eps)
    if c.window is None:
        o = attend(q, k, v, w, c.frequencies)
    else:
        if c.frequencies is not None:
            q, k = rotate(q, c.frequencies), rotate(k, c.frequencies)
        o = hybrid(q, k, v, reach=["window"] * k.heads, window=c.window, scale=q.width**-0.5)
    if c.gated:
        name = "gate_proj" if "gate_proj.weight" in w else "g_proj"  # in folders; in a live model
        o = o * apply(dense(x, w, name, c.heads.queries), "sigmoid")
    return dense(o, w, "o_proj", x.size, bias=c.bias)


def layer_types(config: Config, layers: int) -> tuple[str, ...]:
    """Return what each layer has, by default in turns of four."""
    kinds = ("full_attention", "sliding_attention", "conv")
    turns = [
        "conv" if i == 0 else {0: "sliding_attention", 2: "full_attention"}.get(i % 4, "conv") for i in range(layers)
    ]
    return config.choices("layer_types", *kinds, default=turns, length=layers)
