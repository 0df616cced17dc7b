"""Models small enough to run a thousand tokens of in a test."""

import torch
from support.models import fixtures_of

from tarnn.models import TarnnConfig, TarnnForCausalLM

KINDS = {
    "linear": {},
    "rotary": {"decay": "none", "position": "rotary"},
    "unnormalised": {"decay": "head", "normalize": False, "feature_map": "dpfp"},
    "log-weighted": {"decay": "none", "feature_map": "exp"},
    "softmax": {"attention": "softmax"},
    "hybrid": {"attention": ["linear", "softmax"]},
    "delta": {"attention": ["gated_delta", "softmax"]},
    "none": {"attention": ["none", "linear"], "position": "learned", "max_position_embeddings": 256},
    "post-norm": {"position": "sinusoidal", "norm": "layer", "norm_position": "post", "mlp": "gelu"},
    "recurrent": {"attention": ["gated_delta", "mamba2", "rwkv7"], "num_hidden_layers": 3},
    "convolved": {"conv_kernel": 4, "attention": ["linear", "softmax"]},
}


def build(kind="linear", seed=0, **overrides):
    torch.manual_seed(seed)
    config = TarnnConfig(
        vocab_size=97,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
        eos_token_id=96,
        bos_token_id=96,
        pad_token_id=95,
        **{"num_hidden_layers": 2} | KINDS[kind] | overrides,
    )
    return TarnnForCausalLM(config).eval()


# make_model(kind="linear", **overrides of the config)
kind, model, make_model = fixtures_of(KINDS, build)
