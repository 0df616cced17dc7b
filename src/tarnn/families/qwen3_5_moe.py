"""Qwen3.5 with experts: Qwen3.5's layers, with experts and a shared one instead of each SwiGLU (text model alone)."""

from tarnn.families.config import Config
from tarnn.families.experts import Experts, sparse
from tarnn.families.parts import dense, swiglu
from tarnn.families.qwen3_5 import Mlp, delta_hybrid, projections, text_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    text, prefix = text_of(config, weights)
    text.choice("norm_topk_prob", True)
    if text.sizes("mlp_only_layers", []):
        text.refuse("mlp_only_layers", text.get("mlp_only_layers"), "an empty list")
    return delta_hybrid(text, weights, prefix, projections, shared_and_sparse(text, normalize=True))


def shared_and_sparse(config: Config, normalize: bool) -> Mlp:
    """Return what computes Σ weight·expert + σ(gate)·shared expert. normalize: whether the weights of a token have the sum 1."""
    sizes = Experts.of(config, inner="moe_intermediate_size", normalize=normalize)
    shared = config.size("shared_expert_intermediate_size")

    def mlp(layer: int, x: Register, w: Weights) -> Register:
        gate = apply(dense(x, w, "shared_expert_gate", 1, exact=True), "sigmoid")
        y = swiglu(x, w.under("shared_expert."), shared) * gate
        return sparse(x, w, sizes) + y

    return mlp
