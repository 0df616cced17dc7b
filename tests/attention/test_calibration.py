"""Calibrating a model: what its maps are set to, in which order, and that the estimates get better by it."""

import pytest
import torch
from torch import nn

from tarnn.attention import LinearAttention, calibrating
from tarnn.feature_maps import Elu, OptimalRandomFeatures, PositiveRandomFeatures, Reparametrized

HEAD_DIM, KV_HEADS = 4, 2


def layer(inner=OptimalRandomFeatures, rotary=None, **options):
    heads = {"num_heads": KV_HEADS}
    phi = inner(HEAD_DIM, 64, seed=0, **({} if inner is PositiveRandomFeatures else heads))
    return LinearAttention(
        16,
        4,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        feature_map=Reparametrized(phi, **heads),
        causal=True,
        rotary=rotary,
        bias=True,
        **options,
    )


def large(module, seed=0):
    """Weights so large that queries and keys matter, and biases that put them off centre."""
    torch.manual_seed(seed)
    for name, p in module.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            nn.init.normal_(p, std=0.15 if name.endswith("weight") else 1.0)
    return module


@torch.no_grad()
def test_set_to_the_mean_and_spread_of_what_passed():
    module, x = large(layer()), torch.randn(3, 20, 16)
    with calibrating(module):
        module(x[:2])
        module(x[2:])
    q, k, _ = module.project(x, x)
    phi = module.feature_map
    torch.testing.assert_close(phi.key_centre[:, 0], k.mean((0, 2)))
    torch.testing.assert_close(phi.query_centre[:, 0], q.unflatten(1, (KV_HEADS, 2)).mean((0, 2, 3)))
    ratio = k.var((0, 2), correction=0) / q.unflatten(1, (KV_HEADS, 2)).var((0, 2, 3), correction=0)
    torch.testing.assert_close(phi.stretch[:, 0], ratio**0.25, rtol=1e-4, atol=0)
    assert (phi.feature_map.A < 0).all()
    assert module.calibration is None


@torch.no_grad()
def test_masked_tokens_do_not_count_and_steps_go_on_from_it():
    x, mask = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False
    a, b = large(layer()), large(layer())
    with calibrating(a):
        a(x.masked_fill(~mask[..., None], 50.0), key_mask=mask)
    with calibrating(b):
        b(x[:1, :5])
        b(x[1:])
    torch.testing.assert_close(a.feature_map.stretch, b.feature_map.stretch)
    torch.testing.assert_close(a.feature_map.query_centre, b.feature_map.query_centre)
    b.load_state_dict(a.state_dict())
    whole, state, steps = a(x), b.new_state(2), []
    for i in range(9):
        y, state = b.step(x[:, i : i + 1], state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_later_layers_see_what_they_will_see():
    """The second layer is set to what the first one gives once it is set itself."""
    model, x = nn.Sequential(large(layer(), 0), large(layer(), 1)), torch.randn(2, 30, 16)
    with calibrating(model):
        model(x)
    _, k, _ = model[1].project(model[0](x), model[0](x))
    torch.testing.assert_close(model[1].feature_map.key_centre[:, 0], k.mean((0, 2)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_it_ends_even_when_it_fails_and_gradients_do_not_pass():
    module = layer()
    with pytest.raises(RuntimeError, match="stop"), calibrating(module):
        raise RuntimeError("stop")
    assert module.calibration is None
    with torch.enable_grad(), calibrating(module):
        module(torch.randn(1, 5, 16)).sum().backward()
    assert all(not x.requires_grad for x in module.feature_map.buffers())


def test_a_model_with_nothing_to_calibrate():
    with (
        pytest.raises(ValueError, match="LinearAttention has no layer whose feature map is calibrated"),
        calibrating(LinearAttention(8, 2, feature_map=Elu(), causal=True)),
    ):
        pass


@pytest.mark.compile
def test_a_layer_fitted_by_the_call_is_one_graph():
    heads = {"fit": "call"}
    phi = Reparametrized(OptimalRandomFeatures(HEAD_DIM, 16, seed=0, **heads), **heads)
    module, x = LinearAttention(16, 4, feature_map=phi, causal=False), torch.randn(2, 9, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
