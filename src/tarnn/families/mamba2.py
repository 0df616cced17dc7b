"""Mamba-2: each layer mixes tokens by a state space whose heads fade by time steps of their own, and nothing else.

    x, B, C = silu(filters of W x)        Δ = softplus(W_Δ x + bias)
    S ← e^(−Δ e^A) S + B (Δ x)ᵀ           y = W_o (norm of groups((SᵀC + D x) ⊙ silu(W_z x)))

Dao and Gu 2024 (arXiv 2405.21060). In the words of `recording.linear` x is v, B is k, C is q; heads of a group share B and C.
Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2 have the same mixer, and other names for its sizes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tarnn.families.config import Config
from tarnn.families.parts import head, rms, split_heads, text_model, times
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, clamp, filter, heads, linear, norm, product

SET_AT_FIRST = ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
CHANGES_NOTHING = (
    "time_step_init_scheme",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
    "norm_before_gate",
)


class Multipliers(NamedTuple):
    """Factors of the sections of the first projection, behind its bias."""

    z: float = 1.0
    x: float = 1.0
    B: float = 1.0
    C: float = 1.0
    step: float = 1.0


NEUTRAL = Multipliers()


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a layer, and what it has.

    eps: of the norm of groups; None: there is no norm. bias: of the first projection; out_bias: of the last. steps: the
    least and the largest Δ. gate_first: outputs are gated, then divided by their norms; else the other way round.
    """

    heads: int
    width: int
    groups: int
    state: int
    taps: int
    eps: float | None
    bias: bool
    out_bias: bool
    filter_bias: bool
    steps: tuple[float, float] = (0.0, math.inf)
    gate_first: bool = True
    multipliers: Multipliers = NEUTRAL

    @classmethod
    def of(cls, config: Config, hidden: int, eps: float) -> "Mamba2Sizes":
        """Read them under Mamba-2's names."""
        n, width = config.size("num_heads"), config.size("head_dim")
        inner = config.size("expand", 2) * hidden
        if n * width != inner or config.size("intermediate_size", inner) != inner:
            config.refuse("num_heads", n, f"{inner} channels (expand · hidden_size) divided by head_dim ({width})")
        bias = config.flag("use_bias", False)
        return cls(
            n,
            width,
            groups_of(config, "n_groups", n, 8),
            state=config.size("state_size"),
            taps=config.size("conv_kernel", 4, least=2),
            eps=eps,
            bias=bias,
            out_bias=bias,
            filter_bias=config.flag("use_conv_bias", True),
            steps=limit_of_steps(config),
        )

    @classmethod
    def of_hybrid(cls, config: Config, hidden: int, eps: float | None, inner: int | None = None) -> "Mamba2Sizes":
        """Read them under the names of Bamba, Granite 4 and Falcon-H1. inner: channels; None: mamba_expand · hidden."""
        inner = config.size("mamba_expand", 2) * hidden if inner is None else inner
        n = config.size("mamba_n_heads", 128)
        width = inner // n if config.get("mamba_d_head", "auto") == "auto" else config.size("mamba_d_head")
        if n * width != inner:
            config.refuse("mamba_n_heads", n, f"{inner} channels divided by mamba_d_head ({width})")
        bias = config.flag("mamba_proj_bias", False)
        config.skip("mamba_chunk_size", "use_mamba_kernels")
        return cls(
            n,
            width,
            groups_of(config, "mamba_n_groups", n, 1),
            state=config.size("mamba_d_state", 256),
            taps=config.size("mamba_d_conv", 4, least=2),
            eps=eps,
            bias=bias,
            out_bias=bias,
            filter_bias=config.flag("mamba_conv_bias", True),
            steps=limit_of_steps(config),
        )


def groups_of(config: Config, key: str, num_heads: int, default: int) -> int:
    """Return the number of groups of heads that share B and C."""
    groups = config.size(key, default)
    if num_heads % groups:
        config.refuse(key, groups, f"a divisor of the number of heads ({num_heads})")
    return groups


def limit_of_steps(config: Config) -> tuple[float, float]:
    """Return the least and the largest Δ, of prompts and of steps alike."""
    least, most = config.numbers("time_step_limit", [0.0, math.inf], length=2, infinite=True)
    return least, most


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    record, hidden = text_model(config), config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("rms_norm", True)
    config.skip(*SET_AT_FIRST, *CHANGES_NOTHING)
    eps, name = config.number("layer_norm_epsilon", 1e-5, least=0), "backbone.embeddings.weight"
    c = Mamba2Sizes.of(config, hidden, eps)
    x = record.embed(weights.get(name, (config.size("vocab_size"), hidden)))
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"backbone.layers.{i}.")
        x = x + mixer(rms(x, w, "norm", eps), w.under("mixer."), c)
    done = head(rms(x, weights, "backbone.norm_f", eps), config, weights, name)
    config.check_all_taken()
    weights.check_all_taken()
    return done


def mixer(h: Register, w: Weights, c: Mamba2Sizes) -> Register:
    """Mix tokens. w: the mixer's tensors."""
    state = h.record.state("Mamba2State")
    inner, n = c.heads * c.width, c.groups * c.state
    sections = [inner, inner + 2 * n, c.heads]
    rows = w.get("in_proj.weight", (sum(sections), h.size)).split(sections)
    biases = w.get("in_proj.bias", (sum(sections),)).split(sections) if c.bias else (None, None, None)
    z, xbc = times(product(h, rows[0], biases[0]), c.multipliers.z), product(h, rows[1], biases[1])
    step_bias = w.get("dt_bias", (c.heads,)).float()
    if c.multipliers.step == 1:
        step_bias = step_bias + (0 if biases[2] is None else biases[2].float())
        step = product(h, rows[2], step_bias, exact=True)
    else:
        step = product(h, rows[2], biases[2], exact=True) * c.multipliers.step + step_bias
    step = heads(apply(step, "softplus"), c.heads)
    step = step if c.steps[0] <= 0 and c.steps[1] == math.inf else clamp(step, *c.steps)
    taps = w.get("conv1d.weight", (inner + 2 * n, 1, c.taps))[:, 0]
    if c.multipliers[1:4] != NEUTRAL[1:4]:  # of what the filters read, so of their taps
        factors = torch.tensor(c.multipliers[1:4]).repeat_interleave(torch.tensor([inner, n, n]))
        taps = taps.float() * factors[:, None]
    filtered = filter(xbc, taps, state, w.get("conv1d.bias", (inner + 2 * n,)) if c.filter_bias else None)
    x, B, C = split_heads(filtered, (c.heads, c.width), (c.groups, c.state), (c.groups, c.state))
    rate = w.get("A_log", (c.heads,)).double().exp().neg().float()[:, None]
    y = linear(C, B, x * step, state, log_decay=step * rate, normalize=False, keep_z=False)
    y, gate = y + x * w.get("D", (c.heads,))[:, None], apply(z, "silu")
    if c.eps is None:
        y = y * heads(gate, c.heads)
    else:
        y = heads(y * heads(gate, c.heads) if c.gate_first else y, c.groups)
        y = norm(y, w.get("norm.weight", (inner,)), eps=c.eps)
        y = y if c.gate_first else y * heads(gate, c.groups)
    out = w.get("out_proj.weight", (h.size, inner))
    return product(y, out, w.get("out_proj.bias", (h.size,)) if c.out_bias else None)
