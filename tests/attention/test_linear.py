"""What linear attention refuses, and where rotary positions go."""

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
)
from tarnn.feature_maps import CosFormer, Elu, Exp, Identity, OptimalRandomFeatures, PositiveRandomFeatures
from tarnn.models import TarnnConfig

FAVOR, FITTED = PositiveRandomFeatures(4, 6), OptimalRandomFeatures(4, 6, fit="call")
ACROSS = {"causal": False, "context_size": 5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": Identity()}, "Identity.*negative.*normalize=False"),
        ({"decay": HeadDecay(2), "causal": False}, "two decays.*got one. Pass both, or causal=True"),
        ({"decay_back": HeadDecay(2)}, "decay_back fades later tokens, which causal attention does not see"),
        ({"decay": HeadDecay(2), "decay_back": HeadDecay(2), **ACROSS}, "a context does not share"),
        (
            {"decay": HeadDecay(2), "decay_back": HeadDecay(2), "causal": False, "rotary": Rotary(4)},
            "rotary positions rotate features of Elu.*a decay knows the order",
        ),
        ({"feature_map": Exp(), "rotary": Rotary(4)}, "rotary.*Exp"),
        ({"rotary": Rotary(6)}, "features.*4; got 6"),
        ({"feature_map": FAVOR, "rotary": Rotary(6)}, "q and k.*4; got 6"),
        ({"feature_map": FITTED}, "by the call.*causal.*calibrated"),
        ({"feature_map": CosFormer(9), "rotary": Rotary(8)}, "CosFormer.*rotary"),
        ({"feature_map": CosFormer(9), **ACROSS}, "CosFormer.*cross attention"),
        ({"rotary": Rotary(4), "decay": ChannelDecay(8, 2, 4)}, "rotary.*channel decay"),
        ({"rotary": Rotary(4), **ACROSS}, "rotary.*cross attention"),
    ],
)
def test_choices_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        LinearAttention(8, 2, **{"causal": True, **options})


def test_softmax_refuses_a_rotary_that_does_not_fit():
    with pytest.raises(ValueError, match=r"rotary.*4; got 6"):
        SoftmaxAttention(8, 2, causal=True, rotary=Rotary(6))
    with pytest.raises(ValueError, match=r"rotary.*cross attention"):
        SoftmaxAttention(8, 2, **ACROSS, rotary=Rotary(4))


def test_softmax_needs_a_capacity():
    with pytest.raises(ValueError, match="say how many, capacity="):
        SoftmaxAttention(8, 2, causal=True).new_state(1)


def test_no_attention_needs_a_context_as_long_as_x():
    none = NoAttention(8, 2, causal=False, context_size=5)
    x, context = torch.randn(1, 3, 8), torch.randn(1, 3, 5)
    assert torch.equal(none(x, context), none.o_proj(none.v_proj(context)))
    with pytest.raises(ValueError, match=r"as long as x; got x \(1, 3, 8\) and context \(1, 2, 5\)"):
        none(x, context[:, :2])


def test_a_map_fitted_by_the_call_leaves_no_state():
    module = LinearAttention(8, 2, feature_map=OptimalRandomFeatures(4, 6, fit="call"), causal=False, context_size=8)
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match=r'fitted by the call.*Make the map with fit="calibrated"'):
        module(x, x, return_state=True)
    with pytest.raises(ValueError, match="fitted by the call"):
        module(x, state=module.new_state(1))


def test_a_continued_cosformer_needs_positions():
    module = LinearAttention(8, 2, feature_map=CosFormer(9), causal=True)
    with pytest.raises(ValueError, match=r"with CosFormer a continued sequence.*needs positions="):
        module.step(torch.randn(1, 1, 8), module.new_state(1))


def test_rotary_before_random_features_is_softmax_with_rotary():
    """Many features: the softmax attention with the same weights, with positions and all."""
    torch.manual_seed(0)
    phi = PositiveRandomFeatures(4, 20_000, seed=0)
    module = LinearAttention(8, 2, feature_map=phi, causal=True, rotary=Rotary(4))
    exact = SoftmaxAttention(8, 2, causal=True, rotary=Rotary(4))
    exact.load_state_dict({k: v for k, v in module.state_dict().items() if "feature_map" not in k})
    x = torch.randn(1, 9, 8)
    torch.testing.assert_close(module(x), exact(x), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("attention", [LinearAttention, SoftmaxAttention])
def test_a_continued_rotary_sequence_needs_positions(attention):
    options = {"feature_map": Elu()} if attention is LinearAttention else {}
    module = attention(8, 2, causal=True, rotary=Rotary(4), **options)
    x, state = torch.randn(1, 2, 8), module.new_state(1, capacity=4)
    with pytest.raises(ValueError, match="needs positions="):
        module(x, state=state)
    with pytest.raises(ValueError, match="needs positions="):
        module.step(x[:, :1], state)


def test_rotary_knows_distances_only():
    """Far out, too: the same tokens a million positions later give the same outputs."""
    torch.manual_seed(0)
    module = LinearAttention(8, 2, feature_map=Elu(), causal=True, rotary=Rotary(4))
    x = torch.randn(1, 6, 8)
    near, far = torch.arange(6)[None], torch.arange(6)[None] + 1_000_000
    torch.testing.assert_close(module(x, positions=near), module(x, positions=far), rtol=1e-5, atol=1e-5)
    stretched = module(x, positions=near * 2)
    assert not torch.allclose(module(x, positions=near), stretched, atol=1e-3)


def test_a_map_that_gives_no_features_gives_zeros():
    """A relu-like query of zeros under rotary: 0/0 is 0, and gradients are finite."""

    class Nothing(nn.Module):
        def forward(self, x):
            return x.relu() * 0

    module = LinearAttention(8, 2, feature_map=Nothing(), causal=True, rotary=Rotary(4))
    x = torch.randn(1, 5, 8, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("options", [{"rotary": Rotary(4, base=1e8)}, {"normalize": False}], ids=["rotary", "normed"])
@torch.no_grad()
def test_sums_that_nothing_divides_do_not_overflow_in_fp16(options):
    """They grow with t, here past 65504, the largest number in fp16; prefill and step."""
    module = LinearAttention(8, 2, feature_map=Elu(), causal=True, **options)
    for p in module.parameters():
        p.fill_(1.0)
    module.o_proj.weight.fill_(1e-3)
    x = torch.full((1, 3000, 8), 2.0)
    exact = module(x)
    with torch.autocast("cpu", torch.float16):
        y, state = module(x, return_state=True)
        last, _ = module.step(x[:, :1], state, positions=torch.tensor([[3000]]))
    assert state.S.abs().max() > 65504
    torch.testing.assert_close(y.float(), exact, rtol=0.01, atol=0.001)
    torch.testing.assert_close(last[0, 0], y[0, -1], rtol=0.01, atol=0.001)


@pytest.mark.parametrize("how", [{"causal": False}, {"causal": False, "context_size": 8}])
@pytest.mark.parametrize("kind", [GatedDeltaAttention, Mamba2Attention, Rwkv7Attention])
def test_recurrences_need_an_order(kind, how):
    with pytest.raises(ValueError, match=r"needs causal self-attention|recurrence over its own input"):
        kind(20, 5, head_dim=8, **how)


@pytest.mark.refusals
def test_options_of_recurrences_have_a_range():
    for width in (0, 32, 2.0, True):
        with pytest.raises(ValueError, match=r"filter_width.*from 1 to 31"):
            GatedDeltaAttention(20, 2, causal=True, head_dim=8, filter_width=width)
    for option, value in (("filter_width", 32), ("state_size", 0), ("state_size", 4.0)):
        with pytest.raises(ValueError, match=option):
            TarnnConfig(attention="mamba2", attention_options={"mamba2": {option: value}})


def test_mamba2_starts_as_its_paper_says():
    torch.manual_seed(0)
    module = Mamba2Attention(64, 32, causal=True)
    dt, A = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 0.001 <= dt.min() < 0.004 < 0.03 < dt.max() <= 0.1
    assert 1 <= A.min() < 3 < 14 < A.max() <= 16
