"""From the names in a config to the objects that they stand for."""

import inspect

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
    Dpfp,
    Elu,
    Exp,
    FeatureMap,
    Hedgehog,
    Identity,
    Polynomial2,
    Relu,
    SquaredRelu,
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
    "dpfp": Dpfp,
    "hedgehog": Hedgehog,
}


def make_feature_map(config, layer: int) -> FeatureMap:
    """This layer's φ. Raises ValueError for options that its map does not have or can't take."""
    name = config.feature_map_of(layer)
    options = dict(config.feature_map_options.get(name, {}))
    parameters = inspect.signature(FEATURE_MAPS[name]).parameters.values()
    known = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - {"head_dim", "num_heads"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"the feature map {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(sorted(known)) or 'none'}."
        )
    if name == "hedgehog":
        options |= {"head_dim": config.head_dim, "num_heads": config.num_key_value_heads}
    try:
        return FEATURE_MAPS[name](**options)
    except TypeError as error:
        raise ValueError(f"the feature map {name!r} can't be made with {options}: {error}.") from error


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
        rotary=Rotary(num_features, config.rotary_base) if rotary else None,
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
