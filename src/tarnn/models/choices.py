"""From the names in a config to the objects that they stand for."""

import inspect
from typing import Any

import torch
from torch import nn

from tarnn.attention import (
    ChannelDecay,
    HeadDecay,
    LinearAttention,
    NoAttention,
    Rotary,
    SoftmaxAttention,
    TokenDecay,
)
from tarnn.feature_maps import (
    CosFormer,
    Dpfp,
    Elu,
    Exp,
    FeatureMap,
    GaussianRandomFeatures,
    GeneralizedFeatures,
    GeneralizedRandomFeatures,
    Hedgehog,
    HyperbolicRandomFeatures,
    Identity,
    OptimalRandomFeatures,
    Polynomial2,
    PositiveRandomFeatures,
    RegularizedRandomFeatures,
    Relu,
    Reparametrized,
    SderfFeatures,
    SquaredRelu,
    Taylor,
    TrigonometricRandomFeatures,
)

ATTENTIONS = {"linear": LinearAttention, "softmax": SoftmaxAttention, "none": NoAttention}
DECAYS = ("none", "head", "token", "channel")
FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "elu": Elu,
    "relu": Relu,
    "squared_relu": SquaredRelu,
    "exp": Exp,
    "identity": Identity,
    "polynomial2": Polynomial2,
    "taylor": Taylor,
    "dpfp": Dpfp,
    "hedgehog": Hedgehog,
    "cosformer": CosFormer,
    "favor": PositiveRandomFeatures,
    "hyperbolic": HyperbolicRandomFeatures,
    "smreg": RegularizedRandomFeatures,
    "oprf": OptimalRandomFeatures,
    "saderf": OptimalRandomFeatures,
    "sderf": SderfFeatures,
    "trigonometric": TrigonometricRandomFeatures,
    "gaussian": GaussianRandomFeatures,
    "generalized": GeneralizedFeatures,
    "generalized_random": GeneralizedRandomFeatures,
}
SOFTMAX_KERNEL = ("favor", "hyperbolic", "smreg", "oprf", "saderf", "sderf", "trigonometric")
MOVES = {"centre", "balance"}  # options of these maps that put a Reparametrized around them
NOT_OPTIONS = {"head_dim", "num_heads", "max_length", "fit", "h"}  # the config's to say, or not for a config


def make_feature_map(config, layer: int) -> FeatureMap:
    """This layer's φ. Raises ValueError for options that its map does not have or can't take.

    What depends on the model comes from it: the width of a head, the number of key/value heads, the longest
    sequence. A seed (0 by default) stands for a seed a layer. Maps that are fitted to data are calibrated ones.
    """
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    parameters = inspect.signature(FEATURE_MAPS[name]).parameters
    known = {
        p for p, x in parameters.items() if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
    } - NOT_OPTIONS
    known |= MOVES if name in SOFTMAX_KERNEL else set()
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"the feature map {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(sorted(known)) or 'none'}."
        )
    moves = {key: options.pop(key) for key in MOVES & set(options)}
    if name == "saderf":
        moves = {"balance": True} | moves
    of_model = {"head_dim": config.head_dim, "num_heads": config.num_key_value_heads}
    options |= {key: value for key, value in of_model.items() if key in parameters}
    if "max_length" in parameters:
        if config.max_position_embeddings is None:
            raise ValueError(
                f"the feature map {name!r} needs to know the longest sequence: max_position_embeddings."
            )
        options["max_length"] = config.max_position_embeddings
    if not isinstance(options.get("function", ""), str):
        raise ValueError(
            f"in a config the function of {name!r} is one of its names; got {options['function']!r}."
        )
    if "seed" in parameters:
        options["seed"] = seed_of(options.get("seed", 0), layer)
    try:
        made: Any = FEATURE_MAPS[name](**options)
    except TypeError as error:
        raise ValueError(f"the feature map {name!r} can't be made with {options}: {error}.") from error
    if not any(moves.values()):
        return made
    return Reparametrized(
        made, num_heads=config.num_key_value_heads, centre=bool(moves.get("centre")),
        balance=bool(moves.get("balance")),
    )  # fmt: skip


def seed_of(seed: int, layer: int) -> int:
    """A layer's seed: layers with one ω would all be wrong in the same places."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**40:
        raise ValueError(f"a feature map's seed is a whole number from 0 to below 2⁴⁰; got {seed!r}.")
    return seed * 100_000 + layer


def make_attention(config, layer: int) -> LinearAttention | SoftmaxAttention | NoAttention:
    """This layer's causal self-attention."""
    kind = config.attention_of(layer)
    shared = {
        "hidden_size": config.hidden_size, "num_heads": config.num_attention_heads, "causal": True,
        "num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "bias": config.bias,
        "qk_norm": config.qk_norm,
    }  # fmt: skip
    rotary = config.position == "rotary"
    if kind == "none":
        return NoAttention(**shared)
    if kind == "softmax":
        return SoftmaxAttention(
            rotary=Rotary(config.head_dim, config.rotary_base) if rotary else None, **shared
        )
    feature_map = make_feature_map(config, layer)
    num_features = feature_map.num_features(config.head_dim)
    return LinearAttention(
        feature_map=feature_map,
        normalize=config.normalize,
        decay=make_decay(config, num_features),
        rotary=Rotary(config.head_dim if feature_map.dot_product else num_features, config.rotary_base)
        if rotary
        else None,
        **shared,
    )


def make_decay(config, num_features: int) -> nn.Module | None:
    """The decay of one linear attention layer."""
    hidden, heads = config.hidden_size, config.num_key_value_heads
    if config.decay == "head":
        return HeadDecay(heads)
    if config.decay == "token":
        return TokenDecay(hidden, heads)
    return ChannelDecay(hidden, heads, num_features) if config.decay == "channel" else None


def check_choices(config) -> None:
    """Raises ValueError for what the layers themselves refuse; each kind is made once, without data."""
    options = config.feature_map_options
    if not isinstance(options, dict) or not all(isinstance(x, dict) for x in options.values()):
        raise ValueError(
            "feature_map_options holds the options of each map under its name, as in {'dpfp': {'nu': 2}}; "
            f"got {options!r}."
        )
    if unknown := sorted(set(options) - set(FEATURE_MAPS)):
        raise ValueError(
            f"feature_map_options: no map is called {', '.join(map(repr, unknown))}; "
            f"the maps are {', '.join(FEATURE_MAPS)}."
        )
    kinds = {(config.attention_of(i), config.feature_map_of(i)): i for i in range(config.num_hidden_layers)}
    with torch.device("meta"):
        for layer in kinds.values():
            make_attention(config, layer)
