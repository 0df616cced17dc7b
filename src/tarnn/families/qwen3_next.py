"""Qwen3-Next, layers without experts: Qwen3.5's layers, with the projections of the delta rule one key head behind the other."""

from tarnn.families.config import Config
from tarnn.families.gated_delta import DeltaSizes, Gates
from tarnn.families.qwen3_5 import delta_hybrid
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, products


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    refuse_experts(config)
    config.choice("use_sliding_window", False)
    return delta_hybrid(config, weights, "model.", projections)


def projections(x: Register, w: Weights, sizes: DeltaSizes) -> tuple[Register, Gates]:
    """Record q, k and v of a layer, and return the rows that gate it: each key head has those of its values, too."""
    each = sizes.values // sizes.keys
    d, e = sizes.key_width, each * sizes.value_width
    rows = w.get("in_proj_qkvz.weight", (sizes.channels + sizes.all_values, x.size)).unflatten(0, (sizes.keys, -1))
    q, k, v, z = rows.split([d, d, e, e], 1)
    b, a = w.get("in_proj_ba.weight", (2 * sizes.values, x.size)).unflatten(0, (sizes.keys, -1)).split([each, each], 1)
    return products(x, q, k, v), Gates(z, b, a)


def refuse_experts(config: Config) -> None:
    """Refuse a model with a layer of experts."""
    experts, step = config.size("num_experts", 512, least=0), config.size("decoder_sparse_step", 1)
    dense = config.sizes("mlp_only_layers", [])
    config.skip("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
    layers = config.size("num_hidden_layers")
    if experts and any(i not in dense and (i + 1) % step == 0 for i in range(layers)):
        config.refuse(
            "num_experts", experts, "0, or mlp_only_layers all layers (layers of experts are not handled yet),"
        )
