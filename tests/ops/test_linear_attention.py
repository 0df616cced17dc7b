"""The laws of linear attention: whatever the path, it is the definition."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.attention_cases import MAPS, Case, cases, relative_error

from tarnn import feature_maps
from tarnn.ops import linear_attention, packing
from tarnn.ops.linear import definition as linear_definition

laws = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attend(case: Case, at=slice(None), **more):
    """The op on the case's positions `at`, with its options."""
    options = {}
    for name, x in case.options.items():
        options[name] = x if name == "log_decay" and x.ndim == 1 else x[:, at] if name == "key_mask" else x[:, :, at]
    q, k, v = (x[:, :, at] for x in (case.q, case.k, case.v))
    return linear_attention(
        q, k, v, MAPS[case.feature_map], causal=case.causal, normalize=case.normalize, **{**options, **more}
    )


def same_gradients(case: Case, f, expected_f) -> None:
    """The gradients of all of the case's tensors through f equal those through expected_f, and are finite."""
    if not case.t:
        return
    tensors = [x.requires_grad_() for x in case.tensors()]
    grad = torch.randn(case.b, case.g * case.r, case.t, case.e, dtype=torch.float64)
    got, expected = (
        torch.autograd.grad(y, tensors, grad, allow_unused=True, materialize_grads=True) for y in (f(), expected_f())
    )
    scale = max([1e-6, *(x.abs().max().item() for x in expected)])
    for x, y in zip(got, expected):
        assert x.isfinite().all()
        assert (x - y).abs().max().item() < 1e-8 * scale


@laws
@given(case=cases())
def test_equals_the_definition(chunks, case):
    assert relative_error(attend(case), case.definition()) < 1e-11


@laws
@given(case=cases(d=5))
def test_gradients_equal_those_of_the_definition(chunks, case):
    same_gradients(case, lambda: attend(case), case.definition)


def test_reversed_packed_batch_attends_backwards_within_each_sequence():
    """Attention from the last token to the first: flipping the whole row would mix up the sequences."""
    case = Case(b=1, g=1, r=2, t=13, seed=5)
    cuts = [0, 3, 3, 4, 13]
    cu_seqlens = torch.tensor(cuts, dtype=torch.int32)
    turn = lambda x: packing.reverse(x, cu_seqlens)  # noqa: E731
    back = turn(linear_attention(turn(case.q), turn(case.k), turn(case.v), causal=True, cu_seqlens=cu_seqlens))
    for a, b in zip(cuts, cuts[1:]):
        q, k, v = (x[:, :, a:b].flip(2) for x in (case.q, case.k, case.v))
        assert relative_error(back[:, :, a:b], linear_attention(q, k, v, causal=True).flip(2)) < 1e-12


def test_a_reset_is_the_start_of_a_sequence():
    """log_decay = −∞ forgets all, and costs what comes after it no digits."""
    case = Case(b=1, g=2, r=1, t=70, decay="token", seed=1)
    case.options["log_decay"][:, :, 40] = -torch.inf
    assert relative_error(attend(case)[:, :, 40:], attend(case, slice(40, None))) < 1e-13


def test_identity_map_goes_unnormalised():
    case = Case(b=2, g=1, r=3, t=9, feature_map="identity", normalize=False)
    assert relative_error(attend(case), case.definition()) < 1e-12


def test_queries_of_another_length_read_all_keys_and_a_state():
    """Cross-attention; and a state read by queries alone (no new keys)."""
    q, k, v = (torch.randn(2, 6, 4, 5).double(), torch.randn(2, 3, 11, 5).double(), torch.randn(2, 3, 11, 7).double())
    phi = MAPS["exp"]
    o, state = linear_attention(q, k, v, phi, causal=False, return_state=True)
    assert relative_error(o, linear_definition.quadratic(q.exp(), k.exp(), v, causal=False)) < 1e-12
    assert relative_error(linear_attention(q, k[:, :, :0], v[:, :, :0], phi, causal=False, state=state), o) < 1e-12
    _, first = linear_attention(q, k[:, :, :4], v[:, :, :4], phi, causal=False, return_state=True)
    assert relative_error(linear_attention(q, k[:, :, 4:], v[:, :, 4:], phi, causal=False, state=first), o) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_any_strides(causal, device):
    """(b, t, h·d) viewed as (b, h, t, d), expanded heads, every second position: as their contiguous copies."""
    h, t, d = 4, 21, 6
    q = torch.randn(2, t, h * d, device=device).unflatten(-1, (h, d)).transpose(1, 2)
    k = torch.randn(2, 1, t, d, device=device).expand(2, h, t, d)
    v = torch.randn(2, h, 2 * t, d, device=device)[:, :, ::2]
    got = linear_attention(q, k, v, causal=causal)
    assert torch.equal(got, linear_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=causal))


def test_a_gradient_that_is_expanded():
    """`o.sum()` sends back a gradient with strides 0."""
    case = Case(b=2, g=1, r=2, t=9)
    case.q.requires_grad_()
    got = torch.autograd.grad(attend(case).sum(), case.q)[0]
    assert relative_error(got, torch.autograd.grad(case.definition().sum(), case.q)[0]) < 1e-10


@pytest.mark.parametrize("causal", [True, False])
def test_values_without_width(causal):
    q = torch.randn(1, 2, 5, 3)
    o, state = linear_attention(q, q, q[..., :0], causal=causal, return_state=True)
    assert o.shape == (1, 2, 5, 0)
    assert relative_error(state.z, MAPS["elu"](q.double()).sum(2)) < 1e-6


def test_user_map_learns():
    """Any nn.Module with a forward is a map, and its parameters get their gradient."""
    phi = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Softplus()).double()
    case = Case(b=2, g=2, r=2, t=19)
    got = torch.autograd.grad(
        linear_attention(case.q, case.k, case.v, phi, causal=True).square().sum(), phi.parameters()
    )
    o = linear_definition.quadratic(phi(case.q), phi(case.k), case.v, causal=True)
    for x, y in zip(got, torch.autograd.grad(o.square().sum(), phi.parameters())):
        assert relative_error(x, y) < 1e-10


@pytest.mark.thorough
@pytest.mark.parametrize("map_name", ["elu", "exp"])
@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_whatever_the_number_of_threads(map_name, threads):
    before = torch.get_num_threads()
    case = Case(b=2, g=4, r=1, t=300, d=32, e=32, feature_map=map_name, dtype=torch.float32)
    case.q.requires_grad_()
    torch.set_num_threads(1)
    expected = attend(case)
    expected_grad = torch.autograd.grad(expected.square().sum(), case.q)[0]
    torch.set_num_threads(threads)
    got = attend(case)
    got_grad = torch.autograd.grad(got.square().sum(), case.q)[0]
    torch.set_num_threads(before)
    assert torch.equal(got, expected)
    assert torch.equal(got_grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_decays_are_exact_each_for_itself(weighted, channels, dtype, chunks):
    """Resets within and at the ends of chunks, and decays by factors up to e⁻²⁰: where all terms are positive, each entry of
    each gradient is right to its own size, however small beside the largest."""
    torch.manual_seed(0)
    t, f, e = 70, 5, 3
    rand = lambda *shape: torch.rand(*shape, dtype=dtype) + 0.1  # noqa: E731
    decay = -20 * torch.rand(1, 1, t, *[f] * channels, dtype=dtype) ** 4
    decay[:, :, [1, 15, 16, 31, 32, 33, 47, 69]] = -torch.inf
    inputs = [rand(1, 2, t, f), rand(1, 1, t, f), rand(1, 1, t, e), decay]
    inputs += [4 * rand(1, 1, t)] if weighted else []
    inputs, exact = ([x.to(to).requires_grad_() for x in inputs] for to in (dtype, torch.float64))
    names = ["log_decay", "key_log_weight"]
    options, exactly = (dict(zip(names, xs[3:])) for xs in (inputs, exact))
    o = linear_attention(*inputs[:3], MAPS["identity"], causal=True, normalize=False, **options)
    expected = linear_definition.recurrent(*exact[:3], normalize=False, **exactly)[0]
    grad = rand(1, 2, t, e)
    got = [o, *torch.autograd.grad(o, inputs, grad)]
    for x, y in zip(got, [expected, *torch.autograd.grad(expected, exact, grad.double())]):
        assert torch.equal(x == 0, y == 0)
        assert ((x - y).abs() <= 4 * t * torch.finfo(dtype).eps * y.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", ["head", "token", "channel"])
def test_gradients_of_narrow_decays_are_rounded_once(shape, dtype):
    """Decays in 16 bits, one per head for 3,000 positions among them: their gradients are sums in float32."""
    torch.manual_seed(0)
    t, d = 1000, 4
    q, k, v = (torch.randn(1, 16, t, d) for _ in range(3))
    sizes = {"head": (16,), "token": (1, 16, t), "channel": (1, 16, t, d)}[shape]
    narrow = (-0.1 * torch.rand(sizes)).to(dtype).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    grads = []
    for decay in (narrow, wide):
        o = linear_attention(q, k, v, MAPS["identity"], causal=True, normalize=False, log_decay=decay)
        grads.append(torch.autograd.grad(o.sum() / 100, decay)[0])
    assert grads[1].abs().max() > 1
    assert torch.equal(grads[0], grads[1].to(dtype))


def test_the_slope_of_elu_at_zero_is_one(device):
    """On either side of it and so at it, by the op, by the module, by torch.func, and to both sides."""
    phi = feature_maps.Elu()
    q, k, v = (torch.randn(1, 2, 6, n, dtype=torch.float64, device=device) for n in (3, 3, 4))
    at, near = torch.zeros_like(q), torch.full_like(q, 1e-9)
    decay = torch.full((1, 2, 6), -0.1, dtype=torch.float64, device=device)
    both = {"causal": False, "log_decay": decay, "log_decay_back": decay}
    for attend in (
        lambda q: linear_attention(q, k, v, phi, causal=True),
        lambda q: linear_attention(phi(q), phi(k), v, torch.nn.Identity(), causal=True),
        lambda q: linear_attention(q, k, v, phi, **both, key_log_weight=decay),
    ):
        slopes = [torch.autograd.grad(attend(x.requires_grad_()).sin().sum(), x)[0] for x in (at, near)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
        slope = torch.func.grad(lambda x, attend=attend: attend(x).sin().sum())(at.detach())
        torch.testing.assert_close(slope, slopes[1], rtol=1e-6, atol=1e-6)
