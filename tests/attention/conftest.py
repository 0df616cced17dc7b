"""Every kind of attention, one a row: what is in the table is held to all the laws."""

import pytest
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
from tarnn.feature_maps import Dpfp, Elu, Exp, Hedgehog, Identity, Polynomial2, Relu

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
    "softmax": lambda **more: SoftmaxAttention(**SIZES | more),
    "softmax, one kv head": lambda **more: SoftmaxAttention(
        **SIZES | {"num_kv_heads": 1, "bias": True} | more
    ),
    "softmax, rotary": lambda **more: SoftmaxAttention(rotary=Rotary(HEAD_DIM), **SIZES | more),
    "linear, q and k normed": linear(Elu, qk_norm=True),
    "softmax, q and k normed": lambda **more: SoftmaxAttention(qk_norm=True, **SIZES | more),
    "none": lambda **more: NoAttention(**SIZES | more),
}
CAUSAL_ROWS = ROWS | {
    "linear, decay a head": lambda **m: linear(Elu, decay=HeadDecay(KV_HEADS))(**m),
    "linear, decay a token": lambda **m: linear(Elu, decay=TokenDecay(HIDDEN, KV_HEADS))(**m),
    "linear, decay a channel": lambda **m: linear(Dpfp, decay=ChannelDecay(HIDDEN, KV_HEADS, 2 * HEAD_DIM))(
        **m
    ),
    "linear, log-scaled, decay": lambda **m: linear(Exp, decay=TokenDecay(HIDDEN, KV_HEADS))(**m),
    "linear, rotary, decay a token": lambda **m: linear(
        Elu, decay=TokenDecay(HIDDEN, KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
    "linear, rotary, normed, decay a head": lambda **m: linear(
        Identity, normalize=False, decay=HeadDecay(KV_HEADS), rotary=Rotary(HEAD_DIM)
    )(**m),
}
CROSS_ROWS = {name: ROWS[name] for name in ("linear", "linear, log-scaled", "linear, normed", "softmax")}


def build(row, **options):
    """The row's module in float64, with weights large enough that attention differs from a mean."""
    torch.manual_seed(0)
    module = row(**options).double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("_proj.weight"):
                p.normal_(std=0.6)
    return module


@pytest.fixture(params=list(CAUSAL_ROWS))
def causal(request):
    return build(CAUSAL_ROWS[request.param], causal=True)


@pytest.fixture(params=list(ROWS))
def both_sides(request):
    return build(ROWS[request.param], causal=False)


@pytest.fixture(params=list(CROSS_ROWS))
def cross(request):
    return build(CROSS_ROWS[request.param], causal=False, context_size=CONTEXT)


@pytest.fixture
def rand():
    """rand(*shape): standard normal, float64, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
