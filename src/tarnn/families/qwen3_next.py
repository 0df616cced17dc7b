"""Qwen3-Next: Qwen3.5's layers, dense or of experts, with the projections of the delta rule one key head behind the other."""

from tarnn.families.config import Config
from tarnn.families.gated_delta import DeltaSizes, Gates
from tarnn.families.qwen3_5 import Mlp, delta_hybrid, dense_mlp
from tarnn.families.qwen3_5_moe import shared_and_sparse
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, products


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    config.choice("use_sliding_window", False)
    return delta_hybrid(config, weights, "model.", projections, mlp_of(config))


def projections(x: Register, w: Weights, sizes: DeltaSizes) -> tuple[Register, Gates]:
    """Record q, k and v of a layer, and return the rows that gate it: each key head has those of its values, too."""
    each = sizes.values // sizes.keys
    d, e = sizes.key_width, each * sizes.value_width
    rows = w.get("in_proj_qkvz.weight", (sizes.channels + sizes.all_values, x.size)).unflatten(0, (sizes.keys, -1))
    q, k, v, z = rows.split([d, d, e, e], 1)
    b, a = w.get("in_proj_ba.weight", (2 * sizes.values, x.size)).unflatten(0, (sizes.keys, -1)).split([each, each], 1)
    return products(x, q, k, v), Gates(z, b, a)


def mlp_of(config: Config) -> Mlp:
    """Return what computes a layer's second half: experts in each `decoder_sparse_step`-th layer that is not said to be dense."""
    step, dense = config.size("decoder_sparse_step", 1), config.sizes("mlp_only_layers", [])
    count, layers = config.size("num_experts", 512, least=0), config.size("num_hidden_layers")
    of_experts = {i for i in range(layers) if count and i not in dense and (i + 1) % step == 0}
    names = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
    config.skip(*names, *(["intermediate_size"] if len(of_experts) == layers else []))
    normalize = config.flag("norm_topk_prob", True)
    sparse = shared_and_sparse(config, normalize) if of_experts else None
    plain = dense_mlp(config) if len(of_experts) < layers else None
    found = [sparse if i in of_experts else plain for i in range(layers)]

    def mlp(layer: int, x: Register, w: Weights) -> Register:
        part = found[layer]
        assert part is not None
        return part(layer, x, w)

    return mlp
