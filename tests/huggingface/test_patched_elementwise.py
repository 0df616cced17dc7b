"""Norms and SwiGLU of patched models are computed by tarnn's ops, a node of autograd each; layers with other formulas are not."""

from collections import Counter

import pytest
import torch
from support.linear_families import TOKENS, linear_model

import tarnn
from tarnn.huggingface.patching import elementwise

NAMES = ["Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "OLMo-hybrid", "Kimi Linear", "LFM2"]


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each op by patched layers."""
    counted = Counter()

    def counting(f):
        def run(*args):
            counted[f.__name__, len(args)] += 1
            return f(*args)

        return run

    for f in (elementwise.rms_norm, elementwise.swiglu):
        monkeypatch.setattr(elementwise, f.__name__, counting(f))
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_norm_and_each_swiglu_is_one_call(name, dtype, calls):
    model = linear_model(name).to(dtype)
    with tarnn.patch_transformers():
        model(TOKENS, use_cache=False)
    kinds = Counter(type(x).__name__ for x in model.modules())
    plain = sum(n for kind, n in kinds.items() if kind.endswith("RMSNorm"))
    gated = sum(n for kind, n in kinds.items() if kind.endswith("RMSNormGated") and not kind.startswith("Kimi"))
    mlps = sum(n for kind, n in kinds.items() if kind.endswith("MLP"))
    assert plain
    assert mlps
    assert calls == +Counter({("rms_norm", 3): plain, ("rms_norm", 4): gated, ("swiglu", 2): mlps})


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_another_activation_is_not_taken_for_silu(activation, calls):
    model = linear_model("Qwen3.5", hidden_act=activation)
    layer, x = model.model.layers[0].mlp, torch.randn(3, 32)
    expected = layer(x)
    with tarnn.patch_transformers():
        assert torch.equal(layer(x), expected)
    assert not calls
