"""Falcon-H1 (TII 2025, arXiv 2507.22448): each layer has softmax and Mamba-2's mixer side by side, then SwiGLU.

Sums, projections and branches have multipliers (μP). That of keys is in the scale of softmax, those of x, B and C are in the
filters' taps, that of logits is in the last norm's gain; others are instructions.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.mamba2 import Mamba2Sizes, Multipliers, mixer
from tarnn.families.parts import Heads, attend, dense, embed, head, qkv, rms, times
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply

CHANGES_NOTHING = ("num_logits_to_keep", "mlp_expansion_factor", "time_step_*", "mamba_expand")


@dataclass(frozen=True)
class FalconLayer:
    """Numbers that all layers share. Those called in, out, key, gate and down are multipliers."""

    eps: float
    heads: Heads
    frequencies: Float[Tensor, " p"]
    bias: bool
    inner: int
    mlp_bias: bool
    softmax_in: float
    softmax_out: float
    mixer_in: float
    mixer_out: float
    key: float
    gate: float
    down: float

    @classmethod
    def of(cls, config: Config, hidden: int, eps: float) -> "FalconLayer":
        sizes = Heads.of(config, hidden)
        gate, down = config.numbers("mlp_multipliers", [1.0, 1.0], length=2)
        return cls(
            eps,
            sizes,
            frequencies=rope_of(config, sizes.width).frequencies(),
            bias=config.flag("attention_bias", False),
            inner=config.size("intermediate_size"),
            mlp_bias=config.flag("mlp_bias", False),
            softmax_in=config.number("attention_in_multiplier", 1.0),
            softmax_out=config.number("attention_out_multiplier", 1.0),
            mixer_in=config.number("ssm_in_multiplier", 1.0),
            mixer_out=config.number("ssm_out_multiplier", 1.0),
            key=config.number("key_multiplier", 1.0),
            gate=gate,
            down=down,
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.choice("sliding_window", None)
    config.choice("attn_layer_indices", None)
    config.choice("mamba_use_mlp", True)
    eps = config.number("rms_norm_eps", 1e-5, least=0)
    c, sizes = FalconLayer.of(config, hidden, eps), mixer_sizes(config, hidden, eps)
    x = embed(config, weights, hidden, scale=config.number("embedding_multiplier", 1.0))
    for i in range(config.size("num_hidden_layers")):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        part = w.under("self_attn.")
        q, k, v = qkv(times(h, c.softmax_in), part, c.heads, bias=c.bias)  # with the mixer's first product one phase
        o = attend(q, k, v, part, c.frequencies, scale=c.key * c.heads.width**-0.5)
        mixed = times(mixer(times(h, c.mixer_in), w.under("mamba."), sizes), c.mixer_out)
        x = x + mixed + times(dense(o, part, "o_proj", hidden, bias=c.bias), c.softmax_out)
        x = x + mlp(rms(x, w, "pre_ff_layernorm", eps), w.under("feed_forward."), c)
    x = rms(x, weights, "model.final_layernorm", eps, scale=config.number("lm_head_multiplier", 1.0))
    return head(x, config, weights, harmless=CHANGES_NOTHING)


def mixer_sizes(config: Config, hidden: int, eps: float) -> Mamba2Sizes:
    """Return the sizes and multipliers of the mixers, which may have a norm, before the gate or behind it."""
    normed, gate_last = config.flag("mamba_rms_norm", False), config.flag("mamba_norm_before_gate", True)
    inner = None if "mamba_d_ssm" in config and config.get("mamba_d_ssm") is None else config.size("mamba_d_ssm", 1024)
    sizes = Mamba2Sizes.of_hybrid(config, hidden, eps if normed else None, inner)
    return replace(
        sizes,
        out_bias=config.flag("projectors_bias", False),
        gate_first=not gate_last,
        multipliers=Multipliers(*config.numbers("ssm_multipliers", [1.0] * 5, length=5)),
    )


def mlp(x: Register, w: Weights, c: FalconLayer) -> Register:
    """Compute SwiGLU with its multipliers."""
    gate, up = (dense(x, w, name, c.inner, bias=c.mlp_bias) for name in ("gate_proj", "up_proj"))
    y = apply(times(gate, c.gate), "silu") * up
    return times(dense(y, w, "down_proj", x.size, bias=c.mlp_bias), c.down)
