"""Mamba-2: each layer mixes tokens by a state space whose heads fade by time steps of their own, and nothing else.

    x, B, C = silu(filters of W x)        Δ = softplus(W_Δ x + bias)
    S ← e^(−Δ e^A) S + B (Δ x)ᵀ           y = W_o (norm of groups((SᵀC + D x) ⊙ silu(W_z x)))

Dao and Gu 2024 (arXiv 2405.21060). In the words of `recording.linear` x is v, B is k, C is q; heads of a group share B and C.
"""

from dataclasses import dataclass

from tarnn.families.config import Config
from tarnn.families.parts import head, rms, split_heads, text_model
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import LayerState, Register, apply, clamp, filter, heads, linear, norm, product

SET_AT_FIRST = ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
CHANGES_NOTHING = (
    "time_step_init_scheme",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
    "norm_before_gate",
)


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a layer. steps: the least and the largest Δ; None: any."""

    heads: int
    width: int
    groups: int
    state: int
    taps: int
    eps: float
    bias: bool
    filter_bias: bool
    steps: tuple[float, float] | None

    @classmethod
    def of(cls, config: Config, hidden: int) -> "Mamba2Sizes":
        n, width = config.size("num_heads"), config.size("head_dim")
        inner = config.size("expand", 2) * hidden
        if n * width != inner or config.size("intermediate_size", inner) != inner:
            config.refuse("num_heads", n, f"{inner} channels (expand · hidden_size) divided by head_dim ({width})")
        groups = config.size("n_groups", 8)
        if n % groups:
            config.refuse("n_groups", groups, f"a divisor of num_heads ({n})")
        limit = config.numbers("time_step_limit", [0.0, float("inf")], length=2, infinite=True)
        return cls(
            n,
            width,
            groups,
            state=config.size("state_size"),
            taps=config.size("conv_kernel", 4, least=2),
            eps=config.number("layer_norm_epsilon", 1e-5, least=0),
            bias=config.flag("use_bias", False),
            filter_bias=config.flag("use_conv_bias", True),
            steps=None if limit[0] <= 0 and limit[1] == float("inf") else (limit[0], limit[1]),
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    record, hidden = text_model(config), config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("rms_norm", True)
    config.skip(*SET_AT_FIRST, *CHANGES_NOTHING)
    c, name = Mamba2Sizes.of(config, hidden), "backbone.embeddings.weight"
    x = record.embed(weights.get(name, (config.size("vocab_size"), hidden)))
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"backbone.layers.{i}.")
        x = x + mixer(rms(x, w, "norm", c.eps), w.under("mixer."), c, record.state("Mamba2State"))
    done = head(rms(x, weights, "backbone.norm_f", c.eps), config, weights, name)
    config.check_all_taken()
    weights.check_all_taken()
    return done


def mixer(h: Register, w: Weights, c: Mamba2Sizes, state: LayerState) -> Register:
    inner, n = c.heads * c.width, c.groups * c.state
    sections = [inner, inner + 2 * n, c.heads]
    rows = w.get("in_proj.weight", (sum(sections), h.size)).split(sections)
    biases = w.get("in_proj.bias", (sum(sections),)).split(sections) if c.bias else (None, None, None)
    z, xbc = (product(h, rows[i], biases[i]) for i in (0, 1))
    step_bias = w.get("dt_bias", (c.heads,)).float() + (0 if biases[2] is None else biases[2].float())
    step = heads(apply(product(h, rows[2], step_bias, exact=True), "softplus"), c.heads)
    step = step if c.steps is None else clamp(step, *c.steps)
    taps = w.get("conv1d.weight", (inner + 2 * n, 1, c.taps))[:, 0]
    filtered = filter(xbc, taps, state, w.get("conv1d.bias", (inner + 2 * n,)) if c.filter_bias else None)
    x, B, C = split_heads(filtered, (c.heads, c.width), (c.groups, c.state), (c.groups, c.state))
    rate = w.get("A_log", (c.heads,)).double().exp().neg().float()[:, None]
    y = linear(C, B, x * step, state, log_decay=step * rate, normalize=False, keep_z=False)
    y = (y + x * w.get("D", (c.heads,))[:, None]) * heads(apply(z, "silu"), c.heads)
    y = norm(heads(y, c.groups), w.get("norm.weight", (inner,)), eps=c.eps)
    out = w.get("out_proj.weight", (h.size, inner))
    return product(y, out, w.get("out_proj.bias", (h.size,)) if c.bias else None)
