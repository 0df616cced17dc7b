"""Build the layers that the names in a config stand for."""

from torch import nn

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.attention.rotary import Rotary
from tarnn.feature_maps import FeatureMap, make, options_of
from tarnn.models.config import ModelConfig
from tarnn.registry import arguments_of


def make_feature_map(config: ModelConfig, layer: int) -> FeatureMap:
    """This layer's φ. Its width, heads and longest sequence are the model's; its seed (0 by default) stands for a seed
    per layer."""
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    if "seed" in options_of(name):
        options["seed"] = seed_of(options.get("seed", 0), layer)
    return make(name, **config.feature_map_sizes(), **options)


def seed_of(seed: int, layer: int) -> int:
    """A layer's seed: layers with one ω would all be wrong in the same places."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**40:
        raise ValueError(f"a feature map's seed is a whole number from 0 to below 2⁴⁰; got {seed!r}.")
    return seed * 100_000 + layer


def make_attention(
    config: ModelConfig, layer: int, *, causal: bool, context_size: int | None = None
) -> MultiHeadAttention:
    """This layer's attention, to its own sequence or, with context_size, to another.

    A kind of attention is given what it takes of all that the config says, and the options under its name.
    """
    name = config.attention_of(layer) if context_size is None else config.cross_attention_of(layer)
    kind = ATTENTIONS.find(name).kind
    takes = arguments_of(kind)
    feature_map = make_feature_map(config, layer) if "feature_map" in takes else None
    decay = rotary = None
    if context_size is None and config.decay != "none" and "decay" in takes:
        decay = make_decay(config, feature_map)
    if context_size is None and config.position == "rotary" and "rotary" in takes:
        rotary = Rotary(kind.rotary_dim(config.head_dim, feature_map), config.rotary_base)
    given = {
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
        "rotary": rotary,
    }
    return ATTENTIONS.build(name, given, config.attention_options.get(name, {}))


def make_decay(config: ModelConfig, feature_map: FeatureMap | None) -> nn.Module:
    """The decay of one layer's state, which has a row for each feature."""
    width = config.head_dim if feature_map is None else feature_map.num_features(config.head_dim)
    given = {"hidden_size": config.hidden_size, "num_heads": config.num_key_value_heads, "num_features": width}
    return DECAYS.build(config.decay, given, {})
