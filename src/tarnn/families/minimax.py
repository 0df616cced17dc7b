"""MiniMax-Text-01 and M1 (arXiv 2501.08313): lightning attention, softmax in some layers, experts in all.

q, k, v = silu(W x) by head        S ← e^−s S + k vᵀ        y = W_o (σ(W_g x) ⊙ norm(Sᵀ q))
s of head i of H in layer l of L: 2^(−8i/H) (1 − l/(L − 1 + 10⁻⁵) + 10⁻⁵)

Blocks are x ← α norm(x) + β f(norm(x)): what goes on is the row as it was normed, with an α and β for each kind of f.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.parts import LFM, Heads, attention, dense, embed, head, rms
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, heads, linear, product

KINDS = ("full_attention", "linear_attention")
COMPUTED = tuple(f"*.self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    config.choice("hidden_act", "silu")
    config.choice("sliding_window", None)
    config.skip("block_size", "router_jitter_noise")  # how prompts are cut, and training
    sizes, eps = Heads.of(config, hidden), config.number("rms_norm_eps", 1e-5, least=0)
    experts = Experts.of(config, count="num_local_experts", inner="intermediate_size")
    rotated = config.size("rotary_dim", sizes.width, most=sizes.width)
    frequencies = rope_of(config, sizes.width, theta=1e6, partial=rotated / sizes.width).frequencies()
    factors = {name: factors_of(config, name) for name in ("full_attn", "linear_attn", "mlp")}
    x = embed(config, weights, hidden)
    default = [KINDS[(i + 1) % 2 == 0] for i in range(layers)]
    for i, kind in enumerate(config.choices("layer_types", *KINDS, default=default, length=layers)):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        if kind == "linear_attention":
            y = lightning(h, w.under("self_attn."), sizes, slopes(sizes.queries, i, layers))
            alpha, beta = factors["linear_attn"]
        else:
            y, (alpha, beta) = attention(h, w.under("self_attn."), sizes, frequencies), factors["full_attn"]
        h = rms(h * alpha + y * beta, w, "post_attention_layernorm", eps)
        alpha, beta = factors["mlp"]
        old = "block_sparse_moe.gate.weight" in w
        x = h * alpha + sparse(h, w.under("block_sparse_moe." if old else "mlp."), experts, names=LFM) * beta
    return head(rms(x, weights, "model.norm", eps), config, weights, may_leave=COMPUTED)


def factors_of(config: Config, name: str) -> tuple[float, float]:
    """Return α and β of a kind of block."""
    alpha, beta = (config.number(f"{name}_{factor}_factor", 1.0) for factor in ("alpha", "beta"))
    return alpha, beta


def slopes(num_heads: int, layer: int, layers: int) -> Float[Tensor, " h"]:
    """Return the decay of each head, as a rate."""
    base = 2.0 ** (-8 * (torch.arange(num_heads, dtype=torch.float64) + 1) / num_heads)
    return (base * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).float()


def lightning(x: Register, w: Weights, sizes: Heads, rates: Float[Tensor, " h"]) -> Register:
    """Attend linearly with a constant decay per head; `qkv_proj` has q, k and v of one head behind the other."""
    h, d = sizes.queries, sizes.width
    rows = w.get("qkv_proj.weight", (3 * h * d, x.size)).unflatten(0, (h, 3, d))
    q, k, v = (heads(apply(product(x, rows[:, i]), "silu"), h) for i in range(3))
    state = x.record.state("DeltaState")
    o = linear(q, k, v, state, log_decay=-rates, normalize=False, keep_z=False)
    gate = apply(dense(x, w, "output_gate", h * d), "sigmoid")
    return dense(rms(heads(o, 1), w, "norm", 1e-6) * gate, w, "out_proj", x.size)
