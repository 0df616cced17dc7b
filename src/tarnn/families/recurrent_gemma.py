"""RecurrentGemma (Griffin): layers that are a gated linear recurrence, RG-LRU, and in turns softmax attention with a window.

    x = filters of W_x h        a = −8 softplus(Λ) σ(A x + b_A)        i = σ(B x + b_B)        A, B: a matrix per head
    s ← e^a s + √(1 − e^2a) (i ⊙ x)         y = W_o (s ⊙ gelu(W_y h))

De et al. 2024 (arXiv 2402.19427), Botev et al. 2024 (arXiv 2404.07839). The first token's i ⊙ x is not multiplied by the root.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.parts import Heads, dense, embed, head, qkv, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.hybrid import hybrid
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, filter, head_product, heads, rotate
from tarnn.program.scans import diagonal_scan

FUNCTION = "gelu_tanh"
SHARPNESS = -8.0  # of the gate that decays


@dataclass(frozen=True)
class Recurrence:
    """Sizes of RG-LRU. matrices: of each gate, for as many channels each."""

    channels: int
    matrices: int
    taps: int


@dataclass(frozen=True)
class LocalAttention:
    """Softmax attention to the last `window` tokens."""

    heads: Heads
    window: int
    bias: bool
    frequencies: Float[Tensor, " p"]


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_activation", "gelu_pytorch_tanh")
    config.choice("embeddings_scale_by_sqrt_dim", True)
    config.skip("w_init_variance_scale", "final_w_init_variance_scale")
    eps, inner = config.number("rms_norm_eps", 1e-6, least=0), config.size("intermediate_size", least=2) // 2
    mixers: dict[str, Callable[[Register, Weights], Register]] = {
        "recurrent": partial(recurrence, c=recurrence_of(config, hidden)),
        "attention": partial(attention, c=attention_of(config, hidden)),
    }
    turns = config.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(turns, list) or not turns or set(map(str, turns)) - set(mixers):
        config.refuse("block_types", turns, f"a list of one kind or more of {' and '.join(mixers)}")
    x = embed(config, weights, hidden, scale=torch.tensor(hidden**0.5, dtype=torch.bfloat16).item())
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "temporal_pre_norm", eps, from_one=True)
        x = x + mixers[turns[i % len(turns)]](h, w.under("temporal_block."))
        h = rms(x, w, "channel_pre_norm", eps, from_one=True)
        x = x + swiglu(h, w.under("mlp_block."), inner, bias=True, function=FUNCTION)
    x = rms(x, weights, "model.final_norm", eps, from_one=True)
    tied = config.flag("tie_word_embeddings", True)
    cap = config.number("logits_soft_cap", 30.0, least=1e-3)
    return head(x, config, weights, tied=tied, softcap=cap)


def recurrence_of(config: Config, hidden: int) -> Recurrence:
    """Read the sizes of a recurrence."""
    channels, n = config.size("lru_width", hidden), config.size("num_attention_heads")
    if channels % n:
        config.refuse("lru_width", channels, f"a multiple of num_attention_heads ({n})")
    return Recurrence(channels, n, taps=config.size("conv1d_width", 4, least=2))


def recurrence(h: Register, w: Weights, c: Recurrence) -> Register:
    """Record RG-LRU between its two products."""
    state, channels, n, width = h.record.state("FilteredScanState"), c.channels, c.matrices, c.channels // c.matrices
    kernel = w.get("conv_1d.weight", (channels, 1, c.taps))[:, 0]
    x = dense(h, w, "linear_x", channels, bias=True)
    x = filter(x, kernel, state, w.get("conv_1d.bias", (channels,)), function="identity")
    w_gates = w.under("rg_lru.")

    def gate(name: str) -> Register:
        matrices, bias = w_gates.get(f"{name}_weight", (n, width, width)), w_gates.get(f"{name}_bias", (n, width))
        return heads(apply(head_product(heads(x, n), matrices.mT, bias), "sigmoid"), 1)

    rate = SHARPNESS * F.softplus(w_gates.get("recurrent_param", (channels,)).double()).float()
    s = diagonal_scan(x * gate("input_gate"), gate("recurrent_gate") * rate, state, normalize=True)
    y = apply(dense(h, w, "linear_y", channels, bias=True), FUNCTION)
    return dense(s * y, w, "linear_out", h.size, bias=True)


def attention_of(config: Config, hidden: int) -> LocalAttention:
    """Read what the layers with attention have."""
    of_heads = Heads.of(config, hidden)
    return LocalAttention(
        of_heads,
        window=config.size("attention_window_size", 2048),
        bias=config.flag("attention_bias", False),
        frequencies=rope_of(config, of_heads.width, partial=0.5).frequencies(),
    )


def attention(h: Register, w: Weights, c: LocalAttention) -> Register:
    """Record softmax attention with a window."""
    q, k, v = qkv(h, w, c.heads, bias=c.bias)
    q, k = rotate(q, c.frequencies), rotate(k, c.frequencies)
    o = hybrid(q, k, v, reach=["window"] * k.heads, window=c.window, scale=q.width**-0.5)
    return dense(o, w, "o_proj", h.size, bias=True)
