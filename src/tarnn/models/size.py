"""The number of parameters and buffers of a model, counted without allocating them."""

from math import lcm

from tarnn.models.block import Block
from tarnn.models.config import ModelConfig
from tarnn.models.meta_device import build_on_meta


def count_numbers(config: ModelConfig, context_size: int | None = None) -> int:
    """The numbers in a model with an output layer. `context_size`: of its cross-attention, for a decoder.

    One block of each kind is built on the meta device. Raises ValueError for what the layers themselves refuse.
    """
    patterns = (x for x in (config.attention, config.feature_map) if isinstance(x, list))
    period = min(lcm(*(len(x) for x in patterns)), config.num_hidden_layers)
    kinds = [(config.attention_of(i), config.feature_map_of(i)) for i in range(period)]
    in_period = 0
    for kind in set(kinds):
        options = {"layer": kinds.index(kind), "causal": config.causal, "context_size": context_size}
        block = build_on_meta(Block, config, **options)
        in_period += kinds.count(kind) * sum(x.numel() for x in (*block.parameters(), *block.buffers()))
    return in_period * (config.num_hidden_layers // period) + config.numbers_outside_blocks()
