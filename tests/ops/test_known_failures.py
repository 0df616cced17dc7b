"""What went wrong in other libraries, each a case of its own."""

import pytest
import torch
from support.attention_cases import relative_error

from tarnn import feature_maps
from tarnn.ops import LinearState, linear_attention, step
from tarnn.ops.linear import definition as linear_definition


@pytest.mark.thorough
def test_bf16_decoding_for_4096_steps():
    """A z kept in bf16 is wrong by 350 % here. Ours stays within twice the parallel form's error in bf16."""
    torch.manual_seed(0)
    b, h, t, d = 1, 2, 4096, 32
    q, k, v = (torch.randn(b, h, t, d).bfloat16() for _ in range(3))
    phi = feature_maps.Elu()
    exact = linear_definition.recurrent(phi(q.double()), phi(k.double()), v.double())[0]
    parallel = linear_attention(q, k, v, phi, causal=True)
    state, outputs = LinearState.zeros(b, h, d, d), []
    for i in range(t):
        o, state = step(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], phi, state, inplace=True)
        outputs.append(o)
    stepped = torch.cat(outputs, dim=2)
    assert stepped.dtype == torch.bfloat16
    assert relative_error(stepped, exact) <= 2 * relative_error(parallel, exact)
    assert relative_error(stepped[:, :, -100:], exact[:, :, -100:]) < 0.01
    # the failure itself, so that this test is known to see it
    z = torch.zeros(b, h, d, dtype=torch.bfloat16)
    for i in range(t):
        z += phi(k[:, :, i])
    assert relative_error(z, phi(k.double()).sum(2)) > 0.5


@pytest.mark.parametrize("causal", [True, False])
def test_left_padding_with_the_normaliser_on(causal, device):
    """Four pads on eight tokens, full of junk: a mask that zeroes v but not φ(k) is 65 % off here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, device=device) for _ in range(3))
    mask = torch.ones(1, 12, dtype=torch.bool, device=device)
    mask[:, :4] = False
    k[:, :, :4], v[:, :, :4] = 1e4, torch.inf
    padded = linear_attention(q, k, v, causal=causal, key_mask=mask)
    cut = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], causal=causal)
    assert relative_error(padded[:, :, 4:], cut) < 1e-6
    if causal:
        assert (padded[:, :, :4] == 0).all()  # queries that see no key


def test_fp16_at_100_000_positions(device):
    """z passes 65,504, fp16's largest number, after some 50,000 positions. The average of v must not notice."""
    t = 100_000
    q = torch.full((1, 1, t, 4), 0.5, dtype=torch.float16, device=device)
    k = torch.full((1, 1, t, 4), 1.0, dtype=torch.float16, device=device)
    v = torch.linspace(0, 1, t, device=device)[None, None, :, None].half()
    o, state = linear_attention(q, k, v, causal=True, return_state=True)
    assert state.z.min() > 65_504
    exact = v.double().cumsum(2) / torch.arange(1, t + 1, device=device)[:, None]
    assert relative_error(o, exact) < 1e-3  # fp16's own rounding is 5e-4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_relu_query_that_meets_no_key(dtype, causal, device):
    """q·z = 0: zeros and finite gradients, not 0/0 and not 1e10."""
    if dtype == torch.float64 and device == "mps":
        pytest.skip("MPS has no float64")
    q = torch.tensor([[[[-1.0, -2.0], [1.0, -1.0], [1.0, 1.0]]]], dtype=dtype, device=device, requires_grad=True)
    k = torch.tensor([[[[-1.0, 3.0], [-2.0, 1.0], [1.0, 1.0]]]], dtype=dtype, device=device, requires_grad=True)
    v = torch.randn(1, 1, 3, 2, device=device).to(dtype).requires_grad_()
    o = linear_attention(q, k, v, feature_maps.Relu(), causal=causal)
    assert (o[:, :, 0] == 0).all()  # no feature at all
    assert (o[:, :, 1] == 0).all() == causal  # where causal, no feature that its keys have too
    for grad in torch.autograd.grad(o.sum(), (q, k, v)):
        assert grad.isfinite().all()
        assert grad.abs().max() < 100
    step_o, _ = step(q[:, :, :1], k[:, :, :1], v[:, :, :1], feature_maps.Relu())
    assert (step_o == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_meets_no_key_passes_no_gradient(causal):
    """Its features are orthogonal to all keys': what is divided by zero must not come back to the keys as 1e33."""
    q, k, v = (torch.tensor([[[x]]], requires_grad=True) for x in ([1.0, 0.0], [0.0, 1.0], [3.0, 5.0]))
    o = linear_attention(q, k, v, torch.nn.Identity(), causal=causal)
    assert (o == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(o.sum(), (q, k, v)))


def test_dk_goes_through_the_denominator():
    """With v constant the output is that constant whatever k is: numerator and denominator cancel in dk.

    A library that leaves the denominator out of dk sends back a gradient of the numerator's size.
    """
    q, k = (torch.randn(1, 1, 70, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.full((1, 1, 70, 3), 2.0, dtype=torch.float64)
    for causal in (True, False):
        whole = torch.autograd.grad(linear_attention(q, k, v, causal=causal).sum(), k)[0]
        numerator = torch.autograd.grad(linear_attention(q, k, v, causal=causal, normalize=False).sum(), k)[0]
        assert whole.abs().max() < 1e-12
        assert numerator.abs().max() > 1


def test_features_far_below_a_usual_epsilon():
    """Keys and queries near −12: sums around 1e-9. With eps = 1e-6 the output collapses to 0."""
    q, k, v = torch.randn(1, 1, 9, 4) - 12, torch.randn(1, 1, 9, 4) - 12, torch.randn(1, 1, 9, 4)
    exact = linear_definition.quadratic(q.double().exp(), k.double().exp(), v.double(), causal=True)
    assert relative_error(linear_attention(q, k, v, causal=True), exact) < 1e-5
    assert relative_error(linear_attention(q, k, v, causal=True, eps=1e-6), exact) > 0.9


@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_exponential_features_of_any_size(size):
    """Exponents around ±1,000 overflow any float; each query's and key's own maximum is taken out, and the step agrees."""
    torch.manual_seed(1)
    q, k = (2 * torch.randn(1, 2, 90, 6) + size * torch.randn(1, 2, 90, 1) for _ in range(2))
    v = torch.randn(1, 2, 90, 6)
    phi = feature_maps.Exp()
    o, state = linear_attention(q, k, v, phi, causal=True, return_state=True)
    # Σ_f e^(q_f + k_f), as a softmax over pairs and features
    w = k.double()[..., None, :, :] + q.double()[..., :, None, :]
    w = w.masked_fill(torch.ones(90, 90, dtype=torch.bool).triu(1)[..., None], -torch.inf)
    exact = torch.softmax(w.flatten(-2), -1).unflatten(-1, (90, 6)).sum(-1) @ v.double()
    assert relative_error(o, exact) < 1e-5
    _, past = linear_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], phi, causal=True, return_state=True)
    last, after = step(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], phi, past)
    assert relative_error(last, exact[:, :, -1:]) < 1e-5
    assert relative_error(after.S, state.S) < 1e-5


def test_a_heavy_key_early_does_not_drown_what_comes_after_it_has_decayed():
    """w_0 = 200 decays by e^-1 a token: after 400 tokens the others must count, not underflow under a stale maximum."""
    t = 600
    w = torch.zeros(1, 1, t)
    w[..., 0] = 200
    q = k = torch.zeros(1, 1, t, 2)
    v = torch.arange(t, dtype=torch.float32)[None, None, :, None]
    o = linear_attention(q, k, v, causal=True, key_log_weight=w, log_decay=torch.tensor([-1.0]))
    exact = linear_definition.recurrent(
        k.double() + 1, k.double() + 1, v.double(), key_log_weight=w.double(), log_decay=torch.tensor([-1.0]).double()
    )[0]
    assert o[0, 0, 100, 0] < 1e-30  # still the early key's value, 0
    assert o[0, 0, -1, 0] > 590  # a stale maximum would leave 0/0 here
    assert relative_error(o, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_low_precision_costs_at_most_twice_the_definitions_error(causal, dtype, device):
    """Forward and gradients in 16 bits, against the definition in the same dtype, both against float64."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 130, 16, device=device).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(2, 2, 130, 16, device=device).to(dtype)
    phi = feature_maps.Elu()

    def definition(q, k, v):
        return linear_definition.quadratic(phi(q), phi(k), v, causal=causal)

    def errors(f):
        o = f(*inputs)
        return [relative_error(x, y) for x, y in zip([o, *torch.autograd.grad(o, inputs, grad)], exact)]

    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    o = definition(*wide)
    exact = [o, *torch.autograd.grad(o, wide, grad.cpu().double())]
    ours = errors(lambda q, k, v: linear_attention(q, k, v, causal=causal))
    for mine, theirs in zip(ours, errors(definition)):
        assert mine <= 2 * theirs


def test_the_state_handed_out_may_be_written_to_before_backward():
    """Where attention is not causal backward reads the state of all keys: a copy of its own."""
    q, k, v = (torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3))
    grads = []
    for spoil in (False, True):
        o, state = linear_attention(q, k, v, causal=False, return_state=True)
        if spoil:
            with torch.no_grad():
                for x in (state.S, state.z):
                    x.zero_()
        grads.append(torch.autograd.grad(o.sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads))
