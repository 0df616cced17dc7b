"""LFM2 and LFM2.5 (Liquid AI 2025, arXiv 2511.23404): short gated convolutions, and softmax in some layers."""

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.parts import LFM, Heads, attend, dense, embed, head, qkv, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, filter


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, eps = config.size("hidden_size"), config.number("norm_eps", 1e-5, least=0)
    sizes, inner, layers = Heads.of(config, hidden), width_of_mlp(config), config.size("num_hidden_layers")
    frequencies = rope_of(config, sizes.width, theta=1e6).frequencies()
    taps, bias = config.size("conv_L_cache", 3), config.flag("conv_bias", False)
    check_repeated(config, hidden, sizes, eps)
    x = embed(config, weights, hidden)
    for i, kind in enumerate(layer_types(config, layers)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "operator_norm", eps)
        if kind == "conv":
            x = x + gated_convolution(h, w.under("conv."), taps, bias)
        else:
            x = x + attention(h, w.under("self_attn."), sizes, eps, frequencies)
        x = x + swiglu(rms(x, w, "ffn_norm", eps), w.under("feed_forward."), inner, names=LFM)
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    return head(rms(x, weights, "model.embedding_norm", eps), config, weights, tied=tied)


def gated_convolution(x: Register, w: Weights, taps: int, bias: bool) -> Register:
    """Compute W (C ⊙ filter(B ⊙ x')), where B, C and x' are projections of x."""
    n, state = x.size, x.record.state("ConvolutionState")
    before, behind, y = dense(x, w, "in_proj", 3 * n, bias=bias).split(n, n, n)
    weight, offset = w.get("conv.weight", (n, 1, taps))[:, 0], w.get("conv.bias", (n,)) if bias else None
    y = behind * filter(before * y, weight, state, offset, function="identity")
    return dense(y, w, "out_proj", n, bias=bias)


def attention(x: Register, w: Weights, sizes: Heads, eps: float, frequencies: Float[Tensor, " p"]) -> Register:
    q, k, v = qkv(x, w, sizes)
    q, k = rms(q, w, "q_layernorm", eps), rms(k, w, "k_layernorm", eps)
    return dense(attend(q, k, v, w, frequencies), w, "out_proj", x.size)


def width_of_mlp(config: Config) -> int:
    """Return ⅔ of what the config says, times a factor, rounded up; or what it says."""
    inner = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    factor, multiple = (
        config.number("block_ffn_dim_multiplier", 1.0, least=1e-3, most=1e3),
        config.size("block_multiple_of", 256),
    )
    if not config.flag("block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def layer_types(config: Config, layers: int) -> tuple[str, ...]:
    """Return what each layer has. Older folders list the layers with attention."""
    attention = config.sizes("full_attn_idxs", tuple(range(layers)))
    default = ["full_attention" if i in attention else "conv" for i in range(layers)]
    return config.choices("layer_types", "full_attention", "conv", default=default, length=layers)


def check_repeated(config: Config, hidden: int, sizes: Heads, eps: float) -> None:
    """Refuse other values of keys that say again what others say, or that always say one thing."""
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.choice(name, hidden)
    config.choice("num_heads", sizes.queries)
    config.choice("block_norm_eps", eps)
    config.choice("block_use_swiglu", True)
    config.choice("use_pos_enc", True)
    config.skip("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
