"""Every kind of attention, one a row: what is in the table is held to all the laws."""

import pytest
import torch
from torch import nn

from tarnn.attention import (
    ChannelDecay,
    GatedDeltaAttention,
    HeadDecay,
    LinearAttention,
    Mamba2Attention,
    NoAttention,
    Rotary,
    Rwkv7Attention,
    SoftmaxAttention,
    TokenDecay,
    WindowAttention,
)
from tarnn.feature_maps import (
    CosFormer,
    Dpfp,
    Elu,
    Exp,
    Hedgehog,
    Identity,
    OptimalRandomFeatures,
    Polynomial2,
    PositiveRandomFeatures,
    Relu,
    Reparametrized,
    SderfFeatures,
    Taylor,
    TrigonometricRandomFeatures,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 14, 6, 3, 4, 10  # no two alike
SIZES = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}


class Cosh(nn.Module):
    """A user's own map: no more than a module with a forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return torch.cat([(self.scale * x).exp(), (-self.scale * x).exp()], dim=-1)


def linear(feature_map, **options):
    return lambda **more: LinearAttention(feature_map=feature_map(), **SIZES | options | more)


def positive():
    return PositiveRandomFeatures(HEAD_DIM, 10, seed=0)


def moved(fit="calibrated", inner=OptimalRandomFeatures, **options):
    """A reparametrized map, its parameters as if it had been calibrated."""
    heads = {"num_heads": KV_HEADS, "fit": fit}
    phi = Reparametrized(inner(HEAD_DIM, 10, seed=0, **heads), **heads, **options)
    generator = torch.Generator().manual_seed(0)
    for name, x in phi.named_buffers():
        if name.endswith(("centre", "stretch", ".A")):
            x.add_(0.3 * torch.rand(x.shape, generator=generator) * (-1 if name.endswith("A") else 1))
    return phi


ROWS = {
    "linear": linear(Elu),
    "linear, as many kv heads": linear(Relu, num_kv_heads=HEADS),
    "linear, one kv head": linear(Elu, num_kv_heads=1, bias=True),
    "linear, log-scaled": linear(Exp),
    "linear, learned": linear(lambda: Hedgehog(HEAD_DIM, num_heads=KV_HEADS, num_features=10)),
    "linear, wide": linear(lambda: Dpfp(nu=2)),
    "linear, polynomial": linear(lambda: Polynomial2(offset=1.0)),
    "linear, user's map": linear(Cosh),
    "linear, normed": linear(Identity, normalize=False),
    "linear, rotary": linear(Elu, rotary=Rotary(HEAD_DIM)),
    "linear, rotary, wide": linear(Dpfp, rotary=Rotary(2 * HEAD_DIM, base=100.0)),
    "linear, rotary, normed": linear(Identity, normalize=False, rotary=Rotary(HEAD_DIM)),
    "linear, random features": linear(positive),
    "linear, random features, one kv head, rotary": linear(
        positive, num_kv_heads=1, rotary=Rotary(HEAD_DIM), qk_norm=True
    ),
    "linear, moved random features": linear(moved),
    "linear, signed random features, normed": linear(
        lambda: TrigonometricRandomFeatures(HEAD_DIM, 10, seed=0), normalize=False
    ),
    "linear, taylor, rotary": linear(Taylor, rotary=Rotary(HEAD_DIM)),
    "linear, cosformer": linear(lambda: CosFormer(64)),
    "softmax": lambda **more: SoftmaxAttention(**SIZES | more),
    "softmax, one kv head": lambda **more: SoftmaxAttention(**SIZES | {"num_kv_heads": 1, "bias": True} | more),
    "softmax, rotary": lambda **more: SoftmaxAttention(rotary=Rotary(HEAD_DIM), **SIZES | more),
    "linear, q and k normed": linear(Elu, qk_norm=True),
    "softmax, q and k normed": lambda **more: SoftmaxAttention(qk_norm=True, **SIZES | more),
    "none": lambda **more: NoAttention(**SIZES | more),
    "window": lambda **more: WindowAttention(window=3, **SIZES | {"bias": True} | more),
    "window and sinks, rotary": lambda **more: WindowAttention(
        window=2, sinks=2, rotary=Rotary(HEAD_DIM), qk_norm=True, **SIZES | more
    ),
}
CAUSAL_ROWS = ROWS | {
    "linear, decay a head": lambda **m: linear(Elu, decay=HeadDecay(KV_HEADS))(**m),
    "linear, decay a token": lambda **m: linear(Elu, decay=TokenDecay(HIDDEN, KV_HEADS))(**m),
    "linear, decay a channel": lambda **m: linear(Dpfp, decay=ChannelDecay(HIDDEN, KV_HEADS, 2 * HEAD_DIM))(**m),
    "linear, log-scaled, decay": lambda **m: linear(Exp, decay=TokenDecay(HIDDEN, KV_HEADS))(**m),
    "linear, random features, decay a token": lambda **m: linear(
        positive, decay=TokenDecay(HIDDEN, KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
    "linear, rotary, decay a token": lambda **m: linear(
        Elu, decay=TokenDecay(HIDDEN, KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
    "linear, rotary, normed, decay a head": lambda **m: linear(
        Identity, normalize=False, decay=HeadDecay(KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
}
CAUSAL_ROWS |= {
    "gated delta": lambda **m: GatedDeltaAttention(decay=TokenDecay(HIDDEN, KV_HEADS), **SIZES | m),
    "gated delta, decay a head": lambda **m: GatedDeltaAttention(decay=HeadDecay(KV_HEADS), **SIZES | m),
    "gated delta, decay a channel": lambda **m: GatedDeltaAttention(
        decay=ChannelDecay(HIDDEN, KV_HEADS, HEAD_DIM), filter_width=2, **SIZES | m
    ),
    "gated delta, no decay, no filters, bias": lambda **m: GatedDeltaAttention(filter_width=1, bias=True, **SIZES | m),
    "mamba2": lambda **m: Mamba2Attention(HIDDEN, HEADS, head_dim=HEAD_DIM, state_size=5, **m),
    "mamba2, no filters, bias": lambda **m: Mamba2Attention(
        HIDDEN, HEADS, head_dim=HEAD_DIM, filter_width=1, bias=True, **m
    ),
    "rwkv7": lambda **m: mixed(Rwkv7Attention(HIDDEN, HEADS, head_dim=HEAD_DIM, **m)),
}


def mixed(layer):
    """RWKV-7 whose products of low rank, mixtures and bonus matter."""
    with torch.no_grad():
        for name, x in layer.mixing.named_parameters(recurse=False):
            x.uniform_(0.1, 0.9) if x.ndim == 3 or name == "r_k" else x.normal_(std=0.3)
    return layer


def twice(kind, *sizes):
    """A decay for each side."""
    return {"decay": kind(*sizes), "decay_back": kind(*sizes)}


BOTH_ROWS = ROWS | {
    "window, sinks": lambda **more: WindowAttention(window=2, sinks=1, **SIZES | more),
    "linear, a head fades": lambda **m: linear(Identity, normalize=False, **twice(HeadDecay, KV_HEADS))(**m),
    "linear, a token fades": lambda **m: linear(Elu, **twice(TokenDecay, HIDDEN, KV_HEADS))(**m),
    "linear, a channel fades": lambda **m: linear(Dpfp, **twice(ChannelDecay, HIDDEN, KV_HEADS, 2 * HEAD_DIM))(**m),
    "linear, log-scaled, fades": lambda **m: linear(Exp, **twice(TokenDecay, HIDDEN, KV_HEADS))(**m),
    "linear, random features, fades": lambda **m: linear(
        positive, **twice(TokenDecay, HIDDEN, KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
    "linear, cosformer, fades": lambda **m: linear(lambda: CosFormer(64), **twice(TokenDecay, HIDDEN, KV_HEADS))(**m),
    "linear, fitted by the call": linear(lambda: moved("call")),
    "linear, fitted by the call, with covariances": linear(lambda: moved("call", SderfFeatures, balance=False)),
}
CROSS_ROWS = {
    name: ROWS[name]
    for name in ("linear", "linear, log-scaled", "linear, normed", "linear, moved random features", "softmax")
}


def build(row, **options):
    """The row's module in float64, with weights large enough that attention differs from a mean."""
    torch.manual_seed(0)
    module = row(**options).double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith(("_proj.weight", "receptance.weight", "key.weight", "value.weight", "output.weight")):
                p.normal_(std=0.6)
    return module


@pytest.fixture(params=list(CAUSAL_ROWS))
def causal(request):
    return build(CAUSAL_ROWS[request.param], causal=True)


@pytest.fixture(params=[*((name, True) for name in CAUSAL_ROWS), *((name, False) for name in BOTH_ROWS)], ids=str)
def layer(request):
    """Every kind, causal and not."""
    name, causal = request.param
    return build((CAUSAL_ROWS if causal else BOTH_ROWS)[name], causal=causal)


@pytest.fixture(params=list(CROSS_ROWS))
def cross(request):
    return build(CROSS_ROWS[request.param], causal=False, context_size=CONTEXT)


@pytest.fixture
def rand():
    """rand(*shape): standard normal, float64, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
