"""Small models of every kind that the fused step supports, one a row."""

import contextlib

import torch

from tarnn.attention import calibrating
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig

TEXT = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "initializer_range": 0.2,
    "head_dim": 10,
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "initializer_range": 0.2,
    "image_height": 5,
    "image_width": 4,
    "num_mixtures": 3,
}
NARROW, WIDE = ({"gated_delta": {"filter_width": width}} for width in (1, 7))
SERVED = {
    "default": {},
    "wider than a panel": {"hidden_size": 72, "head_dim": 34, "intermediate_size": 200, "vocab_size": 131},
    "grouped": {"num_key_value_heads": 2, "bias": True, "mlp": "gelu"},
    "one key head": {"num_key_value_heads": 1, "decay": "head", "qk_norm": False, "norm": "layer"},
    "exp": {"feature_map": "exp", "position": "learned", "max_position_embeddings": 64},
    "squared relu": {"feature_map": ["squared_relu", "relu", "elu"], "position": "sinusoidal", "decay": "none"},
    "unnormalised": {"feature_map": "identity", "normalize": False, "decay": "head"},
    "post-norm": {"norm_position": "post", "norm": "layer", "max_position_embeddings": 64, "position": "sinusoidal"},
    "softmax": {"attention": "softmax", "num_key_value_heads": 2, "position": "learned", "max_position_embeddings": 64},
    "hybrid": {"attention": ["linear", "softmax", "none"], "position": "rotary", "bias": True},
    "rotated features": {"position": "rotary", "num_key_value_heads": 2, "max_position_embeddings": 64},
    "rotated features, unnormalised": {"position": "rotary", "feature_map": "elu", "normalize": False, "decay": "head"},
    "channels": {"decay": "channel", "feature_map": ["elu", "favor", "hedgehog"], "num_key_value_heads": 2},
    "delta": {"attention": "gated_delta"},
    "delta, channels": {"attention": "gated_delta", "decay": "channel", "num_key_value_heads": 2, "head_dim": 34},
    "delta without decay": {"attention": "gated_delta", "decay": "none", "bias": True, "attention_options": NARROW},
    "delta, a decay a head": {"attention": "gated_delta", "decay": "head", "attention_options": WIDE},
    "delta and others": {"attention": ["gated_delta", "softmax", "linear"], "position": "rotary"},
    "mamba2": {
        "attention": "mamba2",
        "bias": True,
        "head_dim": 20,
        "attention_options": {"mamba2": {"state_size": 17}},
    },
    "rwkv7": {"attention": "rwkv7", "norm_position": "post", "norm": "layer", "mlp": "gelu"},
    "rwkv7, squared relu": {"attention": "rwkv7", "norm": "layer", "mlp": "squared_relu", "head_dim": None},
    "mamba2 alone": {"attention": "mamba2", "mlp": "none"},
    "rwkv7 and others": {"attention": ["mamba2", "rwkv7", "softmax"], "head_dim": 34, "position": "rotary"},
    "convolved": {"conv_kernel": 5, "attention": ["linear", "softmax", "gated_delta"], "position": "rotary"},
    "convolved, post-norm": {
        "conv_kernel": 31,
        "norm_position": "post",
        "norm": "layer",
        "hidden_size": 72,
        "bias": True,
    },
    "convolved by one": {"conv_kernel": 1},
    "window": {
        "attention": ["window", "linear", "window"],
        "position": "rotary",
        "num_key_value_heads": 2,
        "attention_options": {"window": {"window": 5, "sinks": 2}},
    },
    "two streams": {"reversible": True, "attention": ["linear", "softmax", "none"]},
    "no layers' bias": {"norm_position": "post", "mlp": "gelu", "tie_word_embeddings": False},
}
SERVED_IMAGES = {
    "paper": {},
    "colour": {"num_channels": 3, "likelihood": "categorical"},
    "classes": {"num_classes": 3},
    "grid": {"position": "grid", "num_classes": 2, "norm_position": "pre"},
}
MAPS = {
    "favor": {"num_features": 70},
    "hyperbolic": {"num_features": 24},
    "smreg": {"centre": True, "balance": True},
    "oprf": {"num_features": 40},
    "saderf": {"num_features": 16},
    "sderf": {"num_features": 16},
    "dark": {"num_features": 16},
    "trigonometric": {"num_features": 20},
    "gaussian": {"num_features": 20},
    "dpfp": {"nu": 2},
    "hedgehog": {},
    "taylor": {},
    "polynomial2": {"offset": 0.5},
    "cosformer": {},
    "elu": {},
    "relu": {},
    "squared_relu": {},
    "identity": {},
    "exp": {},
}
FUNCTIONS = ("relu", "exp", "abs", "sigmoid", "gelu", "cos")


def text_model(**choices):
    torch.manual_seed(0)
    return moved(TarnnForCausalLM(TarnnConfig(**TEXT | choices)))


def map_model(name, options, **choices):
    """A model with this map, normalised where it can be, whose parameters from data are those of some."""
    choices |= {"feature_map": name, "feature_map_options": {name: options}, "num_hidden_layers": 2}
    choices |= {"max_position_embeddings": 64, "position": "learned"}
    try:
        model = text_model(**choices)
    except ValueError:
        model = text_model(**choices, normalize=False)
    with contextlib.suppress(ValueError), torch.no_grad(), calibrating(model):
        model(torch.randint(0, 97, (2, 60)))
    return model


def image_model(**choices):
    torch.manual_seed(0)
    return moved(TarnnForImageGeneration(TarnnImageConfig.paper(**IMAGE | choices)))


def moved(model):
    """Vectors that start as zeros or ones get other numbers, or nobody would miss them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()
