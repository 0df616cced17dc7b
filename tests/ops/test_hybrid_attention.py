"""The laws of hybrid attention: whatever the path, it is the dense definition."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import tarnn
from tarnn.kernels import contract
from tarnn.kernels.cpu import library
from tarnn.kernels.eager.hybrid import CHUNK
from tarnn.kernels.hybrid import at
from tarnn.ops import softmax_attention
from tarnn.ops.hybrid import attend as hybrid_attend
from tarnn.ops.hybrid.op import hybrid_attention, hybrid_step
from tarnn.ops.states import HybridState

D, E = 4, 5
laws = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAPS = {
    "favor": tarnn.PositiveRandomFeatures(D, 8, seed=1),
    "elu": tarnn.Elu(),
    "exp": tarnn.feature_maps.Exp(),
    "clusters": tarnn.feature_maps.QueryClusters(D, 6, seed=1).double(),
    "none": None,
}
pytestmark = pytest.mark.one_path


def tensors(b, g, r, t, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (b, g * r, t, D), (b, g, t, D), (b, g, t, E)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@st.composite
def cases(draw, causal=None, t=None, **fixed):
    """(q, k, v, map, options) of hybrid attention."""
    b, g, r = (draw(st.integers(1, 2)) for _ in range(3))
    t = draw(st.sampled_from([0, 1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])) if t is None else t
    causal = draw(st.booleans()) if causal is None else causal
    seed = draw(st.integers(0, 10**6))
    q, k, v = tensors(b, g, r, t, seed=seed)
    torch.manual_seed(seed)
    options = {
        "causal": causal,
        "window": draw(st.sampled_from([1, 2, 7, CHUNK, 2 * CHUNK])),
        "sinks": draw(st.sampled_from([0, 1, 3])),
        "slots": draw(st.sampled_from([0, 1, 5, CHUNK + 3])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "far_bias": torch.randn(g * r, dtype=torch.float64),
    }
    if draw(st.booleans()):
        options["key_mask"] = torch.rand(b, t) > 0.3
    if causal and draw(st.booleans()):
        options["log_decay"] = -torch.rand(b, g, t, dtype=torch.float64)
    return q, k, v, MAPS[draw(st.sampled_from(sorted(MAPS)))], {**options, **fixed}


def close(x, y, tolerance=1e-11):
    return x.shape == y.shape and (x.numel() == 0 or (x - y).abs().max().item() < tolerance)


@laws
@given(case=cases(causal=True), cuts=st.lists(st.integers(0, 137), max_size=4))
def test_prefix_then_rest_is_the_whole(case, cuts):
    q, k, v, phi, options = case
    whole, end = hybrid_attention(q, k, v, phi, return_state=True, **options)
    t, state, pieces = q.shape[2], None, []
    bounds = [0, *sorted(min(cut, t) for cut in cuts), t]
    for a, b in zip(bounds, bounds[1:]):
        here = {
            n: x[:, a:b] if n == "key_mask" else x[:, :, a:b]
            for n, x in options.items()
            if n in ("key_mask", "log_decay")
        }
        parts = (x[:, :, a:b] for x in (q, k, v))
        o, state = hybrid_attention(*parts, phi, state=state, return_state=True, **{**options, **here})
        pieces.append(o)
    assert close(torch.cat(pieces, 2), whole)
    same_state(state, end)
    assert state.nbytes == end.nbytes


def true_sum(x, M):
    return x * torch.where(M == -torch.inf, 0.0, M).exp().view(*M.shape, *[1] * (x.ndim - M.ndim))


def in_order(state: HybridState) -> HybridState:
    """With the slots in the order of time: which of them a key stands in means nothing."""
    order, near = state.place.argsort(-1), state.k.shape[2] - state.place.shape[2]
    rest = torch.arange(near).expand(*order.shape[:2], -1)
    whole = torch.cat([rest, near + order], -1)
    there = {name: at(getattr(state, name), whole) for name in ("k", "v")}
    there |= {name: getattr(state, name).gather(2, order) for name in ("score", "place")}
    return replace(state, fade=state.fade.gather(2, whole), **there)


def same_state(got: HybridState, expected: HybridState):
    got, expected = in_order(got), in_order(expected)
    for name in (x.name for x in fields(expected)):
        x, y = getattr(got, name), getattr(expected, name)
        if name in ("S", "z"):  # in units of e^M
            x, y = true_sum(x, got.M), true_sum(y, expected.M)
        assert close(torch.nan_to_num(x, neginf=-1), torch.nan_to_num(y, neginf=-1), 1e-10), name


def steps(q, k, v, phi, *, inplace=False, log_decay=None, **options):
    """All tokens one by one, from a state that has seen nothing."""
    pieces, state = [], None
    for t in range(q.shape[2]):
        now = [x[:, :, t : t + 1] for x in (q, k, v)]
        decay = None if log_decay is None else log_decay[:, :, t : t + 1]
        o, state = hybrid_attention(
            *now, phi, state=state, return_state=True, log_decay=decay, inplace=inplace and t > 0, **options
        )
        pieces.append(o)
    return torch.cat(pieces, 2), state


@settings(laws, max_examples=12)
@given(case=cases(causal=True, t=20, key_mask=None), inplace=st.booleans())
def test_token_by_token_is_the_whole(case, inplace):
    q, k, v, phi, options = case
    del options["key_mask"]
    whole, end = hybrid_attention(q, k, v, phi, return_state=True, **options)
    o, state = steps(q, k, v, phi, inplace=inplace, **options)
    assert close(o, whole)
    same_state(state, end)
    assert state.nbytes == end.nbytes


def test_in_float32_steps_chunks_and_the_definition_agree():
    q, k, v = tensors(2, 2, 2, 90, torch.float32)
    options = {"causal": True, "window": 16, "sinks": 2, "slots": 8}
    for phi in (MAPS["favor"], MAPS["elu"]):
        exact = hybrid_attention(*(x.double() for x in (q, k, v)), phi, **options)
        for o in (hybrid_attention(q, k, v, phi, **options), steps(q, k, v, phi, **options)[0]):
            assert close(o.double(), exact, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_slots_over_everything_are_softmax(causal):
    q, k, v = tensors(2, 2, 2, 30)
    o, share = hybrid_attention(
        q, k, v, MAPS["favor"], causal=causal, window=3, sinks=2, slots=25 if causal else 28, return_far_share=True
    )
    assert close(o, softmax_attention(q, k, v, causal=causal))
    assert (share == 0).all()


def test_slots_keep_the_keys_that_features_represent_worst():
    """A key many times larger than the others is still exact long after it has left the window."""
    q, k, v = tensors(1, 1, 1, 60)
    k[:, :, 10] *= 20
    options = {"causal": True, "window": 4, "sinks": 1, "slots": 1, "return_state": True}
    _, state = hybrid_attention(q, k, v, MAPS["favor"], **options)
    assert state.place.item() == 10
    assert torch.equal(state.k[:, :, -1], k[:, :, 10])


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_over_everything_is_softmax(causal):
    q, k, v = tensors(2, 2, 2, 30)
    window = 28 if causal else 30  # on both sides, the first query is 29 from the last key
    o, share = hybrid_attention(q, k, v, MAPS["favor"], causal=causal, window=window, sinks=2, return_far_share=True)
    assert close(o, softmax_attention(q, k, v, causal=causal))
    assert (share == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_shares_of_packed_sequences_are_as_precise_as_alone(causal):
    q, k, v = tensors(1, 2, 2, 30, torch.bfloat16)
    options = {"causal": causal, "window": 3, "return_far_share": True}
    _, packed = hybrid_attention(q, k, v, MAPS["elu"], cu_seqlens=torch.tensor([0, 11, 30]), **options)
    alone = [
        hybrid_attention(*(x[:, :, part] for x in (q, k, v)), MAPS["elu"], **options)[1]
        for part in (slice(0, 11), slice(11, 30))
    ]
    assert close(packed, torch.cat(alone, 2), 1e-6)


def test_constant_features_count_keys():
    """With φ = 1 and λ = 0 each far key weighs 1."""

    class One(tarnn.FeatureMap):
        def num_features(self, head_dim):
            return 1

        def forward(self, x):
            return torch.ones_like(x[..., :1])

    q, k, v = tensors(1, 1, 1, 50)
    _, share = hybrid_attention(0 * q, k, v, One(), causal=True, window=5, sinks=0, return_far_share=True)
    i = torch.arange(50, dtype=torch.float64)
    assert close(share[0, 0], (i - 4).clamp(min=0) / (i + 1))


def test_states_of_packed_sequences_are_in_order():
    q, k, v = tensors(1, 2, 1, 40)
    options = {"causal": True, "window": 4, "sinks": 1, "slots": 2, "return_state": True}
    _, states = hybrid_attention(q, k, v, MAPS["favor"], cu_seqlens=torch.tensor([0, 25, 28, 40]), **options)
    for i, (a, b) in enumerate([(0, 25), (25, 28), (28, 40)]):
        _, alone = hybrid_attention(*(x[:, :, a:b] for x in (q, k, v)), MAPS["favor"], **options)
        same_state(states.select(torch.tensor([i])), alone)


def test_exact_queries_are_softmax():
    q, k, v = tensors(2, 2, 2, 40)
    o = hybrid_attention(q, k, v, MAPS["favor"], causal=False, window=3, exact_queries=torch.tensor([0, 39]))
    exact = softmax_attention(q, k, v, causal=False)
    assert close(o[:, :, [0, 39]], exact[:, :, [0, 39]])
    assert not close(o[:, :, 1:39], exact[:, :, 1:39], 1e-3)


@settings(laws, max_examples=25)
@given(case=cases(slots=0, log_decay=None))
def test_compiled_gradients_are_the_plain_ones(case):
    """Of q, k, v, λ, and of all that the map learns; in float64 to their last digits, in 16 bits as closely as these allow."""
    q, k, v, phi, options = case
    learned = tarnn.feature_maps.QueryClusters(D, 6, num_heads=k.shape[1], seed=3).double()
    phi = learned if phi is MAPS["exp"] else phi
    weight = torch.randn(*q.shape[:3], E, dtype=torch.float64)

    def gradients(*given, bias):
        inputs = [x.detach().requires_grad_() for x in (*given, bias)]
        o = hybrid_attention(*inputs[:3], phi, **{**options, "far_bias": inputs[3]})
        inputs += list(phi.parameters()) if phi is learned else []
        return torch.autograd.grad((o * weight.to(o.dtype)).sum(), inputs, allow_unused=True, materialize_grads=True)

    small = [x.bfloat16() for x in (q, k, v)]
    found, rounded = gradients(q, k, v, bias=options["far_bias"]), gradients(*small, bias=options["far_bias"])
    with library.disabled():
        plain, plain_rounded = (
            gradients(q, k, v, bias=options["far_bias"]),
            gradients(*small, bias=options["far_bias"]),
        )
    assert all(close(x, y, 1e-9 * (1 + y.abs().max().item() if y.numel() else 1)) for x, y in zip(found, plain))
    size = [1 + (x.abs().max().item() if x.numel() else 0) for x in plain]
    assert all(close(x.double(), y.double(), 0.05 * n) for x, y, n in zip(rounded, plain_rounded, size))


@pytest.mark.parametrize("size", [1.0, 100.0, 10_000.0])
@pytest.mark.parametrize("name", ["favor", "clusters"])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_hold_at_every_norm(name, size, causal):
    """Finite, and as close to float64 as those of plain PyTorch, where features underflow, too."""
    phi = tarnn.feature_maps.QueryClusters(D, 6, num_heads=2, seed=3) if name == "clusters" else MAPS[name]
    q, k, v = tensors(1, 2, 2, 40)

    def gradients(dtype):
        inputs = [(x * n).to(dtype).requires_grad_() for x, n in ((q, size), (k, size), (v, 1.0))]
        o = hybrid_attention(*inputs, phi, causal=causal, window=5, sinks=2)
        return torch.cat([x.flatten() for x in torch.autograd.grad(o.square().sum(), inputs)]).double()

    found = gradients(torch.float32)
    with library.disabled():
        plain, exact = gradients(torch.float32), gradients(torch.float64)
    assert found.isfinite().all()
    assert (found - exact).norm() <= 4 * (plain - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_compiled_gradients_are_differentiated_again(causal):
    q, k, v = tensors(1, 1, 1, 4)
    bias = torch.randn(1, dtype=torch.float64)

    def attend(q, k, v, bias):
        return hybrid_attention(q, k, v, MAPS["favor"], causal=causal, window=2, sinks=1, far_bias=bias)

    assert torch.autograd.gradgradcheck(attend, [x.requires_grad_() for x in (q, k, v, bias)])


@pytest.mark.thorough
def test_threads_change_no_bit():
    q, k, v = (x.requires_grad_() for x in tensors(3, 2, 2, 3 * CHUNK + 5, torch.float32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            o, state = hybrid_attention(q, k, v, MAPS["favor"], causal=True, window=9, sinks=2, return_state=True)
            o = hybrid_attention(q, k, v, MAPS["favor"], causal=True, window=9, sinks=2)
            both = hybrid_attention(
                q, k, v, MAPS["favor"], causal=False, window=9, exact_queries=torch.tensor([1, 100])
            )
            grads = torch.autograd.grad(o.square().sum() + both.square().sum(), (q, k, v))
            with torch.no_grad():
                one, state = hybrid_step(*(x[:, :, :1] for x in (q, k, v)), MAPS["favor"], state, window=9, sinks=2)
            found.append([o, *grads, one, *state.tensors().values()])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


def test_what_has_faded_stays_faded_where_nothing_more_fades():
    """A prefix with decay, then a rest without: as one call with zeros there."""
    q, k, v = tensors(1, 2, 1, 20)
    decay = -torch.rand(1, 2, 20, dtype=torch.float64)
    decay[:, :, 12:] = 0
    options = {"causal": True, "window": 5, "sinks": 1}
    whole = hybrid_attention(q, k, v, MAPS["favor"], log_decay=decay, **options)
    first, rest = ([x[:, :, a:b] for x in (q, k, v)] for a, b in ((0, 12), (12, 20)))
    _, state = hybrid_attention(*first, MAPS["favor"], log_decay=decay[:, :, :12], return_state=True, **options)
    assert close(hybrid_attention(*rest, MAPS["favor"], state=state, **options), whole[:, :, 12:])


def test_a_state_of_another_precision_is_refused():
    q, k, v = tensors(1, 2, 1, 9, torch.float32)
    options = {"causal": True, "window": 3, "sinks": 1, "return_state": True}
    _, state = hybrid_attention(q, k, v, MAPS["favor"], **options)
    for t in (1, 3):
        with pytest.raises(ValueError, match=r"state is torch.float32.*float64"):
            hybrid_attention(*(x[:, :, :t].double() for x in (q, k, v)), MAPS["favor"], state=state, **options)


def test_why_plain_pytorch_computes(monkeypatch):
    if not library.available():
        pytest.skip("no compiled kernels")
    calls, right = [], hybrid_attend.hybrid
    monkeypatch.setattr(hybrid_attend, "hybrid", lambda call: calls.append(call) or right(call))

    def why(*, watched=False, **options):
        q, k, v = (x.requires_grad_(watched) for x in tensors(1, 1, 1, 9, torch.float32))
        hybrid_attention(q, k, v, MAPS["favor"], **{"causal": True, "window": 3, "sinks": 1} | options)
        return contract.reasons("hybrid", calls[-1])["cpu"]

    assert why() is None
    assert why(watched=True) is None
    assert why(causal=False) is None
    assert "Slots" in why(slots=2)
    assert "fade" in why(log_decay=torch.zeros(1, 1, 9))
    assert why(causal=False, watched=True) is None
    assert why(watched=True, exact_queries=torch.tensor([0])) is None
    assert "state" in why(watched=True, return_state=True)
    assert "ρ" in why(watched=True, return_far_share=True)
    with library.disabled():
        assert "switched off" in why()


def test_gradients_of_a_step():
    q, k, v = tensors(1, 1, 2, 9)
    options = {"causal": True, "window": 3, "sinks": 1, "slots": 2}
    inputs = [x[:, :, :7].requires_grad_() for x in (q, k, v)]

    def last(attend):
        return torch.autograd.grad(attend(*inputs, MAPS["favor"], **options)[0].square().sum(), inputs)

    whole = last(lambda *x, **y: hybrid_attention(*x, return_state=True, **y))
    for got, expected in zip(last(steps), whole):
        assert close(got, expected, 1e-9)


def test_a_state_of_other_options_is_refused():
    q, k, v = tensors(1, 1, 1, 9)
    _, state = hybrid_attention(q, k, v, MAPS["elu"], causal=True, window=3, return_state=True)
    for slots in (0, 1):
        with pytest.raises(ValueError, match="window 4"):
            hybrid_attention(q, k, v, MAPS["elu"], causal=True, window=4, slots=slots, state=state)


def test_gradients_are_finite_where_nothing_is_seen():
    q, k, v = (x.requires_grad_() for x in tensors(2, 1, 1, 10))
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[1, 4:] = True
    hybrid_attention(q, k, v, MAPS["favor"], causal=True, window=2, key_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_float32_holds_at_every_norm(size):
    q, k, v = tensors(1, 2, 1, 200)
    exact = hybrid_attention(q * size, k * size, v, MAPS["elu"], causal=True, window=16, sinks=1)
    o = hybrid_attention(*(x.float() for x in (q * size, k * size, v)), MAPS["elu"], causal=True, window=16, sinks=1)
    assert close(o.double(), exact, 1e-5 * max(1.0, size / 10))


@pytest.mark.parametrize("slots", [0, 3])  # with slots in plain PyTorch, without by the compiled kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_far_until_bounds_features_to_the_first_places(slots, dtype):
    """Before that place nothing changes to the bit; from there on window, sinks and slots are alone, on every path."""
    t, until = 150, 70
    q, k, v = tensors(1, 2, 2, t, dtype)
    options = {"causal": True, "window": 7, "sinks": 2, "slots": slots}
    whole = hybrid_attention(q, k, v, MAPS["favor"], **options)
    alone = hybrid_attention(q, k, v, MAPS["favor"], far_bias=-torch.inf, **options)
    options["far_until"] = until
    o, share = hybrid_attention(q, k, v, MAPS["favor"], return_far_share=True, **options)
    assert torch.equal(o[:, :, :until], whole[:, :, :until])
    assert close(o[:, :, until:], alone[:, :, until:], 1e-6)
    assert share[:, :, until - 1].min() > 0
    assert (share[:, :, until:] == 0).all()
    prefix, state = hybrid_attention(*(x[:, :, :60] for x in (q, k, v)), MAPS["favor"], return_state=True, **options)
    found = [prefix]
    for i in range(60, 80):
        one = (x[:, :, i : i + 1] for x in (q, k, v))
        step, state = hybrid_attention(
            *one, MAPS["favor"], state=state, return_state=True, inplace=i % 2 == 0, **options
        )
        found.append(step)
    assert close(torch.cat(found, 2), o[:, :, :80], 1e-6)
    cuts = torch.tensor([0, 75, 150])
    packed = hybrid_attention(q, k, v, MAPS["favor"], cu_seqlens=cuts, **options)
    assert close(
        packed[:, :, 75:], hybrid_attention(*(x[:, :, 75:] for x in (q, k, v)), MAPS["favor"], **options), 1e-6
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    hybrid_attention(*inputs, MAPS["favor"], **options)[:, :, until:].sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_far_until_of_both_sides_is_of_the_whole_sequence():
    q, k, v = tensors(1, 1, 2, 40)
    options = {"causal": False, "window": 5, "sinks": 1}
    whole, alone = (hybrid_attention(q, k, v, phi, **options) for phi in (MAPS["favor"], None))
    assert torch.equal(hybrid_attention(q, k, v, MAPS["favor"], far_until=40, **options), whole)
    assert close(hybrid_attention(q, k, v, MAPS["favor"], far_until=39, **options), alone)


def test_exact_queries_fade_too_and_are_nothing_where_a_row_has_no_token():
    q, k, v = tensors(2, 2, 2, 20)
    decay = -0.2 * torch.rand(2, 2, 20)
    places = torch.tensor([0, 12, 19])
    o = hybrid_attention(q, k, v, "elu", causal=True, window=3, log_decay=decay, exact_queries=places)
    whole = hybrid_attention(q, k, v, None, causal=True, window=20, log_decay=decay)
    assert close(o[:, :, places], whole[:, :, places], 1e-5)
    mask = torch.arange(20) < torch.tensor([15, 8])[:, None]
    for causal in (True, False):
        o = hybrid_attention(q, k, v, "elu", causal=causal, window=3, key_mask=mask, exact_queries=places)
        assert (o.transpose(1, 2)[~mask] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_at_masked_queries_reaches_no_gradient(causal):
    mask = torch.arange(20) < torch.tensor([15, 8])[:, None]
    grads = []
    for junk in (0.0, torch.nan):
        given = [x.masked_fill(~mask[:, None, :, None], junk).requires_grad_() for x in tensors(2, 2, 2, 20)]
        o = hybrid_attention(*given, MAPS["favor"], causal=causal, window=3, sinks=1, key_mask=mask)
        grads.append(torch.autograd.grad(o.masked_fill(~mask[:, None, :, None], 0.0).square().sum(), given))
    for x, y in zip(*grads):
        assert y.isfinite().all()
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_packed_rows_of_unequal_length_are_twice_differentiable(causal):
    q, k, v = (x.double() for x in tensors(1, 1, 1, 9))
    cuts = torch.tensor([0, 2, 9])

    def attend(q, k, v):
        return hybrid_attention(q, k, v, "elu", causal=causal, window=2, cu_seqlens=cuts)

    given = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(attend, given)


@pytest.mark.compile
def test_a_graph_does_not_hold_how_many_queries_are_exact():
    """torch.compile breaks the graph there; asked for a whole one it says why not."""
    inputs, places = tensors(2, 2, 2, 20, torch.float32), torch.tensor([3, 8])

    def f(q, k, v, places):
        return hybrid_attention(q, k, v, tarnn.Elu(), causal=False, window=7, exact_queries=places)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"counts its exact queries.*fullgraph=True leave out exact_queries"):
        torch.compile(f, fullgraph=True, backend="eager")(*inputs, places)
    assert close(torch.compile(f, backend="eager")(*inputs, places), f(*inputs, places), 1e-5)
