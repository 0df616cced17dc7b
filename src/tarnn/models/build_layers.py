"""Build the layers that the names in a config stand for."""

from torch import nn

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.attention.rotary import Rotary
from tarnn.feature_maps import FeatureMap, make, options_of
from tarnn.models.config import ModelConfig
from tarnn.registry import arguments_of


def make_feature_map(config: ModelConfig, layer: int) -> FeatureMap:
    """Make this layer's φ. Its width, heads and longest sequence are the model's; each layer has its own seed, derived from
    the seed in the options (0 by default)."""
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    if "seed" in options_of(name):
        options["seed"] = seed_of(options.get("seed", 0), layer)
    return make(name, **config.feature_map_sizes(), **options)


def seed_of(seed: int, layer: int) -> int:
    """Derive a layer's seed: layers that share one ω would all err for the same inputs."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**40:
        raise ValueError(f"a feature map's seed is a whole number from 0 to below 2⁴⁰; got {seed!r}.")
    return seed * 100_000 + layer


def make_attention(
    config: ModelConfig, layer: int, *, causal: bool, context_size: int | None = None
) -> MultiHeadAttention:
    """Make this layer's attention, to its own sequence or, with context_size, to another.

    Its class receives the arguments that it has among those below, and the options under its name.
    """
    name = config.attention_of(layer) if context_size is None else config.cross_attention_of(layer)
    kind = ATTENTIONS.find(name).kind
    takes = arguments_of(kind)
    feature_map = make_feature_map(config, layer) if "feature_map" in takes else None
    decay = decay_back = rotary = None
    if context_size is None and config.decay != "none" and "decay" in takes:
        decay = make_decay(config, feature_map, causal)
        decay_back = None if causal else make_decay(config, feature_map, causal)
    if context_size is None and config.position == "rotary" and "rotary" in takes:
        rotary = Rotary(kind.rotary_dim(config.head_dim, feature_map), config.rotary_base)
    arguments = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "causal": causal,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "context_size": context_size,
        "bias": config.bias,
        "qk_norm": config.qk_norm,
        "feature_map": feature_map,
        "normalize": config.normalize,
        "decay": decay,
        "decay_back": decay_back,
        "rotary": rotary,
    }
    return ATTENTIONS.build(name, arguments, config.attention_options.get(name, {}))


def make_decay(config: ModelConfig, feature_map: FeatureMap | None, causal: bool) -> nn.Module:
    """Make the decay of one layer's state, which has a row for each feature."""
    width = config.head_dim if feature_map is None else feature_map.num_features(config.head_dim)
    sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_key_value_heads, "num_features": width}
    return DECAYS.build(config.decay, {**sizes, "both_sides": not causal}, {})
