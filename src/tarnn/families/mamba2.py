"""Mamba-2: each layer mixes tokens by a state space whose heads fade by time steps of their own, and nothing else.

    x, B, C = silu(filters of W x)        Δ = softplus(W_Δ x + bias)
    S ← e^(−Δ e^A) S + B (Δ x)ᵀ           y = W_o (norm of groups((SᵀC + D x) ⊙ silu(W_z x)))

Dao and Gu 2024 (arXiv 2405.21060). In the words of `recording.linear` x is v, B is k, C is q; heads of a group share B and C.
Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2 have the same mixer, and other names for its sizes.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tarnn.families.config import REQUIRED, Config
from tarnn.families.parts import embed, head, rms, split_heads, times
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
# of hybrids
KINDS = {"mamba": "mixer", "linear_attention": "mixer", "attention": "softmax", "full_attention": "softmax"}


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
        keys, bias = (("n_groups", 8), ("state_size", REQUIRED), "conv_kernel"), config.flag("use_bias", False)
        return cls.read(config, n, width, *keys, eps, bias, config.flag("use_conv_bias", True))

    @classmethod
    def of_hybrid(cls, config: Config, hidden: int, eps: float | None, inner: int | None = None) -> "Mamba2Sizes":
        """Read them under the names of Bamba, Granite 4 and Falcon-H1. inner: channels; None: mamba_expand · hidden."""
        inner = config.size("mamba_expand", 2) * hidden if inner is None else inner
        n = config.size("mamba_n_heads", 128)
        width = inner // n if config.get("mamba_d_head", "auto") == "auto" else config.size("mamba_d_head")
        if n * width != inner:
            config.refuse("mamba_n_heads", n, f"{inner} channels divided by mamba_d_head ({width})")
        config.skip("mamba_chunk_size", "use_mamba_kernels")
        keys, bias = (
            (("mamba_n_groups", 1), ("mamba_d_state", 256), "mamba_d_conv"),
            config.flag("mamba_proj_bias", False),
        )
        return cls.read(config, n, width, *keys, eps, bias, config.flag("mamba_conv_bias", True))

    @classmethod
    def read(
        cls,
        config: Config,
        num_heads: int,
        width: int,
        groups: tuple[str, int],
        state: tuple[str, int],
        taps: str,
        eps: float | None,
        bias: bool,
        filter_bias: bool,
    ) -> "Mamba2Sizes":
        """Read the others. groups, state, taps: keys of the config, with the family's defaults. bias: of both projections."""
        n = config.size(*groups)
        if num_heads % n:
            config.refuse(groups[0], n, f"a divisor of the number of heads ({num_heads})")
        least, most = config.numbers("time_step_limit", [0.0, math.inf], length=2, infinite=True)
        sizes = config.size(*state), config.size(taps, 4, least=2)
        return cls(num_heads, width, n, *sizes, eps, bias, bias, filter_bias, (least, most))

    def with_least_step(self, config: Config) -> "Mamba2Sizes":
        """Return the sizes of families for which `time_step_min` alone limits Δ."""
        if self.steps != (0.0, math.inf):
            config.refuse(
                "time_step_limit", config.get("time_step_limit"), "[0, Infinity] (time_step_min alone counts)"
            )
        return replace(self, steps=(config.number("time_step_min", 1e-3, least=0), math.inf))


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("rms_norm", True)
    config.skip(*SET_AT_FIRST, *CHANGES_NOTHING)
    eps, name = config.number("layer_norm_epsilon", 1e-5, least=0), "backbone.embeddings.weight"
    c = Mamba2Sizes.of(config, hidden, eps)
    x = embed(config, weights, hidden, name)
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"backbone.layers.{i}.")
        x = x + mixer(rms(x, w, "norm", eps), w.under("mixer."), c)
    return head(rms(x, weights, "backbone.norm_f", eps), config, weights, name)


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
