"""Mamba and Falcon-Mamba: each layer is a selective scan of channels behind a short filter, and nothing else.

    u = silu(filters of W_x x)      Δ, B, C = W u      Δ = softplus(W_Δ Δ + bias)
    h ← e^(−Δ e^A) h + Δ u B        y = W_o ((h·C + D u) ⊙ silu(W_z x))

Gu and Dao 2023 (arXiv 2312.00752). Falcon-Mamba (arXiv 2410.05355) divides Δ, B and C by their root mean squares, before W_Δ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tarnn.families.config import Config
from tarnn.families.parts import dense, embed, head, rms
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import LayerState, Register, apply, filter, norm, product
from tarnn.program.scans import selective_scan

SET_AT_FIRST = ("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme")
CHANGES_NOTHING = (
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "use_mambapy",
    "use_falcon_mambapy",
    "use_associative_scan",
    "fused_add_norm",
    "pad_vocab_size_multiple",
)


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of a layer."""

    inner: int
    state: int
    taps: int
    rank: int
    bias: bool
    filter_bias: bool


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    layers, eps = config.size("num_hidden_layers"), config.number("layer_norm_epsilon", 1e-5, least=0)
    c = sizes_of(config, hidden)
    check_other_names(config, hidden, layers, c)
    divided = config.model_type == "falcon_mamba"
    of_parts = config.number("mixer_rms_eps", 1e-6, least=0) if divided else 0.0
    name = "backbone.embeddings.weight"
    x = embed(config, weights, hidden, name)
    for i in range(layers):
        w = weights.under(f"backbone.layers.{i}.")
        of_layer = w.under("mixer.")
        state = x.record.state("FilteredScanState")
        h = rms(x, w, "norm", eps)
        x = x + mixer(h, of_layer, c, state, (lambda y, _: norm(y, eps=of_parts)) if divided else None)
    tied = config.flag("tie_word_embeddings", True)
    return head(rms(x, weights, "backbone.norm_f", eps), config, weights, name, tied=tied)


def sizes_of(config: Config, hidden: int) -> MambaSizes:
    """Read the sizes of a layer by the names that Mamba's config has."""
    rank = config.get("time_step_rank", "auto")
    return MambaSizes(
        inner=config.size("intermediate_size", config.size("expand", 2) * hidden),
        state=config.size("state_size", 16),
        taps=config.size("conv_kernel", 4, least=2),
        rank=ceil(hidden / 16) if rank == "auto" else config.size("time_step_rank"),
        bias=config.flag("use_bias", False),
        filter_bias=config.flag("use_conv_bias", True),
    )


def check_other_names(config: Config, hidden: int, layers: int, c: MambaSizes) -> None:
    """Refuse a config that says something else by the names that mamba-ssm gives to the same sizes."""
    for key, value in (("d_model", hidden), ("n_layer", layers), ("d_inner", c.inner)):
        config.choice(key, value)
    config.choice("hidden_act", "silu")
    config.choice("rms_norm", True)
    config.choice("ssm_cfg", {})
    config.skip(*SET_AT_FIRST, *CHANGES_NOTHING)


def mixer(
    h: Register, w: Weights, c: MambaSizes, state: LayerState, normed: Callable[[Register, str], Register] | None = None
) -> Register:
    """Record a layer. normed: what becomes of Δ, B and C, by the names dt, b and c, before they are used."""
    rows = w.get("in_proj.weight", (2 * c.inner, h.size)).split(c.inner)
    biases = w.get("in_proj.bias", (2 * c.inner,)).split(c.inner) if c.bias else (None, None)
    x, z = (product(h, rows[i], biases[i]) for i in (0, 1))
    taps = w.get("conv1d.weight", (c.inner, 1, c.taps))[:, 0]
    u = filter(x, taps, state, w.get("conv1d.bias", (c.inner,)) if c.filter_bias else None)
    of_steps, of_both = w.get("x_proj.weight", (c.rank + 2 * c.state, c.inner)).split([c.rank, 2 * c.state])
    parts = product(u, of_steps, exact=True), *product(u, of_both).split(c.state, c.state)
    if normed is not None:
        parts = tuple(normed(y, name) for y, name in zip(parts, ("dt", "b", "c"), strict=True))
    low, B, C = parts
    dt = apply(dense(low, w, "dt_proj", c.inner, bias=True, exact=True), "softplus")
    A = w.get("A_log", (c.inner, c.state)).double().exp().neg().float()
    y = selective_scan(u, dt, B, C, A, state) + u * w.get("D", (c.inner,))
    return dense(y * apply(z, "silu"), w, "out_proj", h.size, bias=c.bias)
