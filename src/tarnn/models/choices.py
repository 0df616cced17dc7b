"""From the names in a config to the layers that they stand for."""

from typing import Any

from torch import nn

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.attention.rotary import Rotary
from tarnn.feature_maps import FeatureMap, make, options_of
from tarnn.feature_maps.by_name import described
from tarnn.feature_maps.registry import MAPS
from tarnn.registry import Registry, arguments_of


def make_feature_map(config, layer: int) -> FeatureMap:
    """This layer's φ. Its width, heads and longest sequence are the model's; its seed (0 by default) stands for a seed
    per layer."""
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    if "seed" in options_of(name):
        options["seed"] = seed_of(options.get("seed", 0), layer)
    return make(name, **of_the_model(config), **options)


def of_the_model(config) -> dict[str, Any]:
    """What a model's feature maps may need to know of it."""
    return {
        "head_dim": config.head_dim,
        "num_heads": config.num_key_value_heads,
        "max_length": config.max_position_embeddings,
    }


def seed_of(seed: int, layer: int) -> int:
    """A layer's seed: layers with one ω would all be wrong in the same places."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**40:
        raise ValueError(f"a feature map's seed is a whole number from 0 to below 2⁴⁰; got {seed!r}.")
    return seed * 100_000 + layer


def make_attention(config, layer: int, *, causal: bool, context_size: int | None = None) -> MultiHeadAttention:
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


def make_decay(config, feature_map: FeatureMap | None) -> nn.Module:
    """The decay of one layer's state, which has a row for each feature."""
    width = config.head_dim if feature_map is None else feature_map.num_features(config.head_dim)
    given = {"hidden_size": config.hidden_size, "num_heads": config.num_key_value_heads, "num_features": width}
    return DECAYS.build(config.decay, given, {})


def named_maps(maps: Any, options: Any) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    """Feature maps given as objects, as names and options: (feature_map, feature_map_options, what the objects were made
    with that is the model's to say, by name).

    Raises ValueError for a map without a name, and where two objects or an object and options disagree.
    """
    if isinstance(maps, list | tuple):
        names: list[Any] = []
        of_models: dict[str, dict[str, Any]] = {}
        for one in maps:
            name, options, of_model = named_maps(one, options)
            names.append(name)
            of_models |= of_model
        return names, options, of_models
    if not isinstance(maps, FeatureMap):
        return MAPS.own_name(maps), options, {}
    name, own, of_model = described(maps)
    if options.get(name, own) != own:
        raise ValueError(
            f"all layers with one kind of feature map have the same options of it; got {options[name]} and {own} "
            f"for {name!r}."
        )
    return name, {**options, name: own}, {name: of_model}


def by_own_names(options: Any) -> Any:
    """Options of feature maps, each map under the one name that a config keeps."""
    return {MAPS.own_name(name): x for name, x in options.items()} if isinstance(options, dict) else options


def check_options(config) -> None:
    """Raises ValueError for options that are not options, as a file can hold them, by name."""
    _check_options("feature_map_options", config.feature_map_options, MAPS, "{'dpfp': {'nu': 2}}")
    _check_options("attention_options", config.attention_options, ATTENTIONS, "{'linear': {'dropout': 0.1}}")


def _check_options(name: str, options: Any, registry: Registry, example: str) -> None:
    if not isinstance(options, dict) or not all(isinstance(x, dict) for x in options.values()):
        raise ValueError(f"{name} holds options under the name that they belong to, as in {example}; got {options!r}.")
    if unknown := sorted(set(options) - set(registry.names())):
        raise ValueError(
            f"{name}: no {registry.what} is called {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(registry.names())}."
        )
    for of, given in options.items():
        for key, value in given.items():
            if not isinstance(value, str | int | float | None):
                raise ValueError(
                    f"in a config the {key} of {of!r} is a name, a number, true, false or null; got {value!r}."
                )
