"""Jamba: Mamba's mixers with norms of Δ, B and C, now and then softmax without positions; a SwiGLU, or experts, in each layer.

Lieber et al. 2024 (arXiv 2403.19887). Every other layer of Jamba-v0.1 has experts; with `num_experts` 1 (Jamba-Reasoning-3B) all
layers have a SwiGLU.
"""

from math import ceil

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.mamba import MambaSizes, mixer
from tarnn.families.parts import Heads, attention, embed, head, rms, swiglu
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register

CHANGES_NOTHING = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, eps = config.size("hidden_size"), config.number("rms_norm_eps", 1e-6, least=0)
    layers, inner = config.size("num_hidden_layers"), config.size("intermediate_size")
    of_heads, c = Heads.of(config, hidden), sizes_of(config, hidden)
    with_softmax = turns(config, "attn_layer", layers, 8, 4)
    with_experts, of_experts = experts_in(config, layers, inner)
    config.choice("hidden_act", "silu")
    config.choice("mamba_inner_layernorms", True)
    config.choice("sliding_window", None)
    config.skip(*CHANGES_NOTHING)
    x = embed(config, weights, hidden)
    for i in range(layers):
        w = weights.under(f"model.layers.{i}.")
        h = rms(x, w, "input_layernorm", eps)
        softmax = i in with_softmax  # nothing tells it positions but the layers before
        x = x + (attention(h, w.under("self_attn."), of_heads) if softmax else mamba(h, w.under("mamba."), c, eps))
        h, w = rms(x, w, "pre_ff_layernorm", eps), w.under("feed_forward.")
        x = x + (sparse(h, w, of_experts, router="router") if i in with_experts else swiglu(h, w, inner))
    return head(rms(x, weights, "model.final_layernorm", eps), config, weights)


def mamba(h: Register, w: Weights, c: MambaSizes, eps: float) -> Register:
    """Record a mixer with norms of Δ, B and C."""
    state = h.record.state("FilteredScanState")
    return mixer(h, w, c, state, lambda y, name: rms(y, w, f"{name}_layernorm", eps))


def sizes_of(config: Config, hidden: int) -> MambaSizes:
    """Read the sizes of the mixers."""
    rank = config.get("mamba_dt_rank", "auto")
    return MambaSizes(
        inner=config.size("mamba_expand", 2) * hidden,
        state=config.size("mamba_d_state", 16),
        taps=config.size("mamba_d_conv", 4, least=2),
        rank=ceil(hidden / 16) if rank == "auto" else config.size("mamba_dt_rank"),
        bias=config.flag("mamba_proj_bias", False),
        filter_bias=config.flag("mamba_conv_bias", True),
    )


def turns(config: Config, what: str, layers: int, period: int, offset: int) -> set[int]:
    """Return the layers that have something once in a period."""
    period = config.size(f"{what}_period", period)
    offset = config.size(f"{what}_offset", offset, least=0, most=period - 1)
    return {i for i in range(layers) if i % period == offset}


def experts_in(config: Config, layers: int, inner: int) -> tuple[set[int], Experts]:
    """Return which layers have experts, and their numbers. They weigh as much as the softmax over all says."""
    n, places = config.size("num_experts", 16), turns(config, "expert_layer", layers, 2, 1)
    config.choice("num_local_experts", n)
    if n == 1 or not places:
        config.skip("num_experts_per_tok")
        return set(), Experts(1, 1, inner)
    return places, Experts(n, config.size("num_experts_per_tok", 2, most=n), inner, {"normalize": False})
