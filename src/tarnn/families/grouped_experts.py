"""MLPs of Kimi and Ling: dense in the first layers, then experts chosen by sigmoids in groups, and some that all tokens share."""

from collections.abc import Callable
from typing import Any

from tarnn.families.config import Config
from tarnn.families.experts import grouped, named, sparse
from tarnn.families.parts import GATED, LFM, swiglu
from tarnn.families.weights import Weights
from tarnn.program.recording import Register

KINDS = ("dense", "sparse")
Mlp = Callable[[int, Register, Weights], Register]  # of a layer's number and tensors


def mlps(config: Config, layers: int, num_dense: int, *defaults: Any) -> Mlp:
    """Return what computes the second half of a layer. num_dense: layers that are dense by default.

    defaults: as `grouped` has them. Folders have one of two names for some keys and tensors.
    """
    first, inner = config.size("first_k_dense_replace", num_dense, least=0), config.size("intermediate_size")
    kinds = config.choices("mlp_layer_types", *KINDS, default=[KINDS[i >= first] for i in range(layers)], length=layers)
    sizes = grouped(config, named(config, "num_experts", "num_local_experts"), *defaults)
    shared = config.size(named(config, "num_shared_experts", "n_shared_experts"), 1) * sizes.inner

    def compute(layer: int, x: Register, w: Weights) -> Register:
        if kinds[layer] == "dense":
            return swiglu(x, w, inner)
        bias = "gate.expert_bias" if "gate.expert_bias" in w else "gate.e_score_correction_bias"
        y = sparse(x, w, sizes, bias=bias, names=LFM if "experts.0.w1.weight" in w else GATED)
        return y + swiglu(x, w.under("shared_experts."), shared)

    return compute
