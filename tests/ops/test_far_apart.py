"""Precision where features lie far apart: float32 errs at most twice as much as the quadratic definition in float32.

Centres of clusters point in different directions, and so do the keys: each feature has its own largest keys, up to 200
nats (powers of e) above those of another. Queries that use the small features alone must not lose their keys.
"""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import tarnn
from tarnn import linear_attention
from tarnn.kernels.cpu import library
from tarnn.ops import hybrid_attention
from tarnn.ops.hybrid import definition as hybrid_exactly

D, E, M = 8, 5, 4
WAYS = ["whole", "in parts", "by steps", "both sides", "packed"]
laws = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def clusters(dtype, heads=1):
    """Centres of length 4 along the first axes."""
    phi = tarnn.feature_maps.QueryClusters(D, M, num_heads=heads, scale=1.0, sharpness=2.0)
    with torch.no_grad():
        phi.centres.copy_(4 * torch.eye(M, D))
    return phi.to(dtype).requires_grad_(False)


def inputs(seed, apart, *, t, b=1, g=2, r=2):
    """Each query near one centre, each key in the direction of one: of feature c with exponents up to apart·c/(M − 1)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def near(size, *shape):
        which = torch.randint(M, shape, generator=draw)
        return size[which][..., None] * torch.eye(M, D, dtype=torch.float64)[which]

    size = apart / 4 * torch.arange(M, dtype=torch.float64) / (M - 1)
    q = near(torch.full((M,), 4.0, dtype=torch.float64), b, g * r, t) + 0.3 * normal(b, g * r, t, D)
    return q, near(size, b, g, t) + 0.3 * normal(b, g, t, D), normal(b, g, t, E)


def log_products(q, k):
    """log φ(q_i)·φ(k_j) (b, h, t, t), by the definition of the map."""
    c = 4 * torch.eye(M, D, dtype=q.dtype)
    y = (2 * (q @ c.mT - 0.5 * c.square().sum(-1))).log_softmax(-1)
    x = (k @ c.mT).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (y[:, :, :, None] + x[:, :, None]).logsumexp(-1)


def linear_definition(q, k, v, causal):
    logits, t = log_products(q, k), q.shape[2]
    if causal:
        logits = logits.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)


def hybrid_definition(q, k, v, causal):
    return hybrid_exactly.hybrid(q, k, v, log_products(q, k), causal=causal, window=3, sinks=1, scale=D**-0.5)[0]


def linear(*args, **options):
    return linear_attention(*args, **options)


def hybrid(*args, **options):
    return hybrid_attention(*args, window=3, sinks=1, **options)


OPS = {"linear": (linear, linear_definition), "hybrid": (hybrid, hybrid_definition)}


def along(op, way, phi, q, k, v):
    """The op in one of its ways. Packed: two equal sequences in a row, of which the second is returned."""
    t = q.shape[2]
    if way in ("in parts", "by steps"):
        cuts = [0, t // 3, t // 2, t] if way == "in parts" else list(range(t + 1))
        outputs, state = [], None
        for a, b in zip(cuts, cuts[1:]):
            now = [x[:, :, a:b] for x in (q, k, v)]
            o, state = op(*now, phi, causal=True, state=state, return_state=True)
            outputs.append(o)
        return torch.cat(outputs, 2)
    if way == "packed":
        twice = [torch.cat([x.flip(2), x], 2) for x in (q, k, v)]
        return op(*twice, phi, causal=True, cu_seqlens=torch.tensor([0, t, t, 2 * t]))[:, :, t:]
    return op(q, k, v, phi, causal=way != "both sides")


def error(x, expected):
    return (x.double() - expected).square().mean().sqrt().item()


def check(found, definition, expected, size):
    """At most twice the definition's error, beyond what two of the kernels' exponentials may round off (9e-8 each)."""
    assert error(found, expected) <= 2 * error(definition, expected) + 2**-22 * size.item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", OPS)
@laws
@given(seed=st.integers(0, 10**6), apart=st.sampled_from([0.0, 60.0, 200.0]), t=st.sampled_from([2, 30, 150]))
def test_the_law_of_precision(op, way, seed, apart, t):
    t = min(t, 30) if way == "by steps" else t
    attend, define = OPS[op]
    wide = inputs(seed, apart, t=t)
    narrow = [x.float() for x in wide]
    wide = [x.double() for x in narrow]
    expected, definition = (define(*x, way != "both sides") for x in (wide, narrow))
    found = along(attend, way, clusters(torch.float32), *narrow)
    check(found, definition, expected, expected.square().mean().sqrt())


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["whole", "in parts", "both sides", "packed"])
@pytest.mark.parametrize("op", OPS)
@settings(laws, max_examples=5)
@given(seed=st.integers(0, 10**6), apart=st.sampled_from([0.0, 60.0, 200.0]))
def test_the_law_of_precision_for_gradients(op, way, seed, apart):
    attend, define = OPS[op]
    narrow = [x.float() for x in inputs(seed, apart, t=90)]
    wide = [x.double() for x in narrow]
    weight = torch.randn(1, 4, 90, E, generator=torch.Generator().manual_seed(seed))

    def gradients(f, given):
        given = [x.clone().requires_grad_() for x in given]
        return torch.autograd.grad((f(*given) * weight.to(given[0].dtype)).sum(), given)

    expected, definition = (gradients(lambda *x: define(*x, way != "both sides"), x) for x in (wide, narrow))
    found = gradients(lambda *x: along(attend, way, clusters(torch.float32), *x), narrow)
    for parts in zip(found, definition, expected):
        check(*parts, parts[-1].abs().max().clamp(min=1e-3))  # sums over queries come before differences


@pytest.mark.parametrize("op", OPS)
@laws
@given(seed=st.integers(0, 10**6), apart=st.sampled_from([0.0, 60.0, 200.0]), cut=st.integers(0, 149))
def test_nothing_later_changes_a_bit(op, seed, apart, cut):
    """Not even keys that are larger than all before, which raise the units of sums."""
    attend, _ = OPS[op]
    q, k, v = (x.float() for x in inputs(seed, apart, t=150))
    before = attend(q, k, v, clusters(torch.float32), causal=True)[:, :, :cut]
    for x in (q, k, v):
        x[:, :, cut:] = 40 * torch.randn(x[:, :, cut:].shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(before, attend(q, k, v, clusters(torch.float32), causal=True)[:, :, :cut])


def test_states_of_both_paths_go_on_in_each_other():
    """Units are another maximum in the compiled kernel than in plain PyTorch; a state says in which its sums are."""
    q, k, v = (x.float() for x in inputs(0, 200.0, t=90))
    phi, state, outputs = clusters(torch.float32), None, []
    whole = hybrid(q, k, v, phi, causal=True)
    for i, (a, b) in enumerate([(0, 40), (40, 41), (41, 42), (42, 43), (43, 70), (70, 90)]):
        with library.disabled() if i % 2 else contextlib.nullcontext():
            now = [x[:, :, a:b] for x in (q, k, v)]
            o, state = hybrid(*now, phi, causal=True, state=state, return_state=True)
        outputs.append(o)
    assert (torch.cat(outputs, 2) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["PositiveRandomFeatures", "HyperbolicRandomFeatures", "OptimalRandomFeatures"])
@pytest.mark.parametrize("opposite", [False, True])
def test_random_features_keep_the_law_up_to_45_nats(name, opposite):
    """They have one maximum per head: within 45 nats features' largest keys may lie apart (beyond about 60 sums underflow;
    the estimates are worthless long before)."""
    width = 64
    phi = getattr(tarnn.feature_maps, name)(width, 64, seed=1)

    def logarithms(x):
        parts = phi.exponents(x)
        u = parts.x @ parts.omega.to(x.dtype).mT
        u = torch.cat([u, -u], -1) if parts.mirrored else u
        return (u if parts.bias is None else u + parts.bias) + parts.offset[..., None]

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 60, n, generator=draw, dtype=torch.float64) for n in (width, width, E))
    if opposite:  # all queries on one side, all keys on the other
        side = torch.randn(width, generator=draw, dtype=torch.float64)
        q, k = q / 2 + side, k / 2 - side
    narrow = [(2.5 * q).float(), (2.5 * k).float(), v.float()]

    def definition(q, k, v):
        logits = (logarithms(q)[:, :, :, None] + logarithms(k)[:, :, None]).logsumexp(-1)
        return logits.masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v

    expected = definition(*(x.double() for x in narrow))
    found = linear(*narrow, phi, causal=True)
    check(found, definition(*narrow), expected, expected.square().mean().sqrt())


def test_two_clusters_far_apart():
    """Keys with exponent 80 towards the first of two centres, queries of the second: float32 once lost all of their keys."""
    torch.manual_seed(0)
    phi = tarnn.feature_maps.QueryClusters(D, 2, scale=1.0)
    with torch.no_grad():
        phi.centres.copy_(torch.tensor([[12.0], [4.0]]) * torch.eye(2, D))
    q, k, v = (torch.randn(1, 1, 40, n, dtype=torch.float64) for n in (D, D, E))
    q, k = 0.3 * q, 0.3 * k
    q[..., 1] += 4
    k[:, :, ::2, 0] += 80 / 12
    for op in (linear, hybrid):
        exact = op(q, k, v, phi.double(), causal=True)
        narrow = op(q.float(), k.float(), v.float(), phi.float(), causal=True)
        assert (narrow - exact).abs().max() < 1e-5
