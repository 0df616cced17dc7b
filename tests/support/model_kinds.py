"""Small models of every kind, one a row, and fixtures of them: what is in the table is held to all the laws."""

import pytest
import torch

from support.models import fixtures_of
from tarnn.models import TarnnConfig, TarnnForCausalLM

TINY = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear": {},
    "default": {"position": "none", "decay": "token"},
    "plain": {"position": "none", "decay": "none", "qk_norm": False},
    "rotary": {"position": "rotary", "decay": "none"},
    "grouped": {"num_key_value_heads": 2, "head_dim": 10, "bias": True, "position": "rotary"},
    "two maps": {"feature_map": ["exp", "hedgehog"], "position": "sinusoidal", "decay": "none"},
    "normed": {"feature_map": "identity", "normalize": False, "decay": "head", "position": "rotary"},
    "gated": {"decay": "channel", "position": "learned", "max_position_embeddings": 64},
    "token decay": {
        "decay": "token",
        "feature_map": "dpfp",
        "feature_map_options": {"dpfp": {"nu": 2}},
        "position": "none",
    },
    "random features": {
        "feature_map": "favor",
        "position": "rotary",
        "decay": "none",
        "feature_map_options": {"favor": {"num_features": 12, "centre": True, "balance": True}},
    },
    "random and placed": {
        "feature_map": ["oprf", "cosformer"],
        "max_position_embeddings": 64,
        "position": "none",
        "feature_map_options": {"oprf": {"num_features": 12}},
    },
    "no attention": {"attention": "none", "position": "sinusoidal"},
}
SOFTMAX = {
    "softmax": {"attention": "softmax", "position": "rotary"},
    "hybrid": {
        "attention": ["linear", "softmax"],
        "position": "rotary",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
    },
    "delta": {"attention": "gated_delta", "position": "none", "decay": "token"},
    "delta hybrid": {"attention": ["gated_delta", "softmax"], "position": "rotary", "num_key_value_heads": 2},
    "all three": {"attention": ["softmax", "none", "linear"], "num_hidden_layers": 3, "position": "none"},
}
KINDS = {**LINEAR, "paper": {}, **SOFTMAX}
UNFUSED = {  # which the tests of the fused step leave out
    "recurrent": {"attention": ["gated_delta", "mamba2", "rwkv7", "softmax"], "num_hidden_layers": 4, "decay": "token"},
    "convolved": {"conv_kernel": 4, "position": "none", "decay": "token"},
    "convolved hybrid": {"attention": ["softmax", "linear"], "conv_kernel": 3, "position": "none"},
}


def build(kind="linear", **overrides):
    """The model in float64, in eval mode, with weights large enough for its tokens to differ."""
    torch.manual_seed(0)
    if kind == "paper":
        return TarnnForCausalLM(TarnnConfig.paper(**TINY | overrides)).double().eval()
    plain = {"position": "rotary", "decay": "none"}
    return TarnnForCausalLM(TarnnConfig(**TINY | plain | (KINDS | UNFUSED)[kind] | overrides)).double().eval()


# make_model(kind="linear", **overrides of the config)
kind, model, make_model = fixtures_of(KINDS, build)


@pytest.fixture
def ids():
    """ids(*shape): token ids from 3 on, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randint(3, 37, shape, generator=generator)
