"""Queries that meet no key, with features whose scale is beyond a float's range: zeros, and finite gradients."""

import pytest
import torch

from tarnn import LinearState, linear_attention, step
from tarnn.feature_maps import Exp, PositiveRandomFeatures, Reparametrized, TrigonometricRandomFeatures

D = 64
MAPS = {
    "trigonometric": lambda: TrigonometricRandomFeatures(D, 8, seed=0),
    "centred": lambda: Reparametrized(PositiveRandomFeatures(D, 8, seed=0)),
    "exp": Exp,
}


def drawn(dtype, size, t=90):
    """q, k and v; queries before the 70th are of this size, so that e^(|q|²/2√d), or e^q, overflows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, t, n, generator=generator, device="cpu") for n in (D, D, 5))
    q[:, :, :70] *= size / q[:, :, :70].norm(dim=-1, keepdim=True)
    return [x.to(torch.get_default_device(), dtype).requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("size", [45.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_zeros_and_finite_gradients(name, dtype, size):
    phi, (q, k, v) = MAPS[name](), drawn(dtype, size)
    mask = torch.ones(2, 90, dtype=torch.bool, device=q.device)
    mask[:, :70] = False
    o = linear_attention(q, k, v, phi, causal=True, normalize=False, key_mask=mask)[:, :, :70]
    all_masked = linear_attention(q, k, v, phi, causal=False, normalize=False, key_mask=mask & False)
    no_keys = linear_attention(q, k[:, :, :0], v[:, :, :0], phi, causal=False, normalize=False)
    for x in (o, all_masked, no_keys):
        assert (x == 0).all()
        for grad in torch.autograd.grad(x.sum(), (q, k, v)):
            assert (grad == 0).all()


@pytest.mark.parametrize("name", MAPS)
def test_a_step_from_a_state_of_zeros(name):
    phi, (q, k, v) = MAPS[name](), (x.detach()[:, :, :1] for x in drawn(torch.float32, 45.0))
    state = LinearState.zeros(2, 3, phi.num_features(D), 5, log_weights=True)
    o, _ = step(
        q, torch.full_like(k, -1e4), v, phi, state, normalize=False, key_log_weight=torch.full(v.shape[:3], -torch.inf)
    )
    assert (o == 0).all()


def test_what_a_float_holds_is_not_infinite():
    """e^95 is not, and e^95 times a small sum is."""
    phi, sums = TrigonometricRandomFeatures(D, 8, seed=0), []
    q, k, v = (x.detach() for x in drawn(torch.float32, 10.0, t=9))
    q = q * (2 * D**0.5 * 95) ** 0.5 / q.norm(dim=-1, keepdim=True)
    for dtype in (torch.float32, torch.float64):
        sums.append(linear_attention(*(x.to(dtype) for x in (q, k, 1e-12 * v)), phi, causal=True, normalize=False))
    assert sums[1].abs().max() < 1e36
    torch.testing.assert_close(sums[0].double(), sums[1], rtol=1e-3, atol=1e-3 * sums[1].abs().max().item())
