"""Routers and experts: the definition against formulas token by token, the compiled ones against it, what is refused."""

import pytest
import torch
import torch.nn.functional as F
from support.drawn_programs import eighths

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.definition import new_states, run
from tarnn.program.experts import Expert, experts, route
from tarnn.program.recording import ProgramError, Recorder, norm, product
from tarnn.program.runtime import Runtime

needs_kernels = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")

T, N, M, E = 11, 6, 5, 8  # tokens, channels, inner channels, experts
GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def compute(x, build):
    """Run a program of which `build` records the middle, on rows x (t, n)."""
    record = Recorder()
    y = build(record.embed(torch.zeros(1, x.shape[1])))
    program = record.head(y, torch.eye(y.size))
    ids, states = torch.zeros(1, len(x), dtype=torch.int64), new_states(program, 1, dtype=torch.float64)
    return run(program, ids, states, positions=[0], extra=x[None], dtype=torch.float64)[0][0]


def routed(logits, k, **options):
    """Return the numbers and weights that `route` gives each token."""
    return [compute(logits, lambda x, i=i: route(x, k, **options)[i]) for i in (0, 1)]


BIAS = 3 * randn(E)


def best(choice, k):
    """The places of the k largest numbers, ascending; of equal ones the first."""
    return sorted(sorted(range(len(choice)), key=lambda i: (-choice[i], i))[:k])


def grouped(choice, k):
    """The same within the two best of four groups of two."""
    groups = best([float(choice[2 * g] + choice[2 * g + 1]) for g in range(4)], 2)
    return sorted((2 * g + i for g in groups for i in range(2)), key=lambda i: (-choice[i], i))[:k]


ROUTERS = {  # options; scores of logits; choice of scores; weights of the chosen scores
    "softmax of the chosen": ({}, lambda x: x.exp(), lambda s: best(s, 3), lambda w: w / w.sum()),
    "softmax of all": ({"normalize": False}, lambda x: x.softmax(0), lambda s: best(s, 3), lambda w: w),
    "sigmoid, bias, scale": (
        {"scores": "sigmoid", "bias": BIAS, "eps": 0.3, "scale": 2.5},
        lambda x: 1 / (1 + (-x).exp()),
        lambda s: best(s + BIAS, 3),
        lambda w: 2.5 * w / (w.sum() + 0.3),
    ),
    "groups": (
        {"scores": "sigmoid", "bias": BIAS, "groups": 4, "groups_kept": 2},
        lambda x: 1 / (1 + (-x).exp()),
        lambda s: sorted(grouped(s + BIAS, 3)),
        lambda w: w / w.sum(),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route(name):
    options, scores, choice, weights = ROUTERS[name]
    logits = randn(T, E)
    chosen, found = routed(logits, 3, **options)
    for i, row in enumerate(logits):
        score = scores(row)
        expected = choice(score)
        assert chosen[i].tolist() == expected
        torch.testing.assert_close(found[i], weights(score[expected]), rtol=1e-12, atol=1e-12)


def test_of_equal_ones_the_first_are_chosen():
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 1, 1, 1], [0.0] * 8, [0, 1, 1, 0, 0, 1, 1, 0]]).double()
    assert routed(logits, 2)[0].tolist() == [[1, 2], [0, 1], [1, 2]]
    assert routed(logits, 2, groups=4)[0].tolist() == [[0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated):
    x, chosen, weights = randn(T, N), torch.randint(E, (T, 3), generator=GENERATOR).sort(-1).values, randn(T, 3)
    gates, ups, downs = randn(E, M, N), randn(E, M, N), randn(E, 7, M)
    all_experts = [Expert(g if gated else None, u, d) for g, u, d in zip(gates, ups, downs, strict=True)]
    function = "silu" if gated else "squared_relu"
    out = compute(
        torch.cat([x, chosen.double(), weights], 1),
        lambda r: experts(*r.split(N, 3, 3), all_experts, function=function),
    )
    for i in range(T):
        expected = torch.zeros(7, dtype=torch.float64)
        for e, weight in zip(chosen[i].tolist(), weights[i], strict=True):
            up = ups[e] @ x[i]
            inner = F.silu(gates[e] @ x[i]) * up if gated else up.relu() ** 2
            expected += weight * (downs[e] @ inner)
        torch.testing.assert_close(out[i], expected, rtol=1e-12, atol=1e-12)


def test_numbers_of_no_expert_are_those_of_the_nearest():
    rows = torch.tensor([[0.5, float("nan")], [0.5, -3.0], [0.5, 1e30], [0.5, 1.5]])
    downs = torch.arange(1.0, 4.0).view(3, 1, 1)
    some = [Expert(None, torch.ones(1, 1), d) for d in downs]

    def build(r):
        x, chosen = r.split(1, 1)
        return experts(x, chosen, x, some, function="identity")

    assert compute(rows.double(), build)[:, 0].tolist() == [0.25, 0.25, 0.75, 0.5]


REFUSED = {
    "more experts than there are": (lambda r: route(r, 9), "a router of 8 experts can't choose 9"),
    "groups that do not divide": (lambda r: route(r, 2, groups=3), "can't choose 2 in 1 of 3 groups"),
    "more groups than there are": (lambda r: route(r, 2, groups=2, groups_kept=3), "in 3 of 2 groups"),
    "groups with too few": (lambda r: route(r, 3, groups=4), "can't choose 3 in 1 of 4 groups"),
    "groups of one": (lambda r: route(r, 1, groups=8), "can't choose 1 in 1 of 8 groups"),
    "another bias": (lambda r: route(r, 2, bias=torch.ones(7)), "8 experts has scores 'softmax' and 7 biases"),
    "another score": (lambda r: route(r, 2, scores="relu"), "scores 'relu'"),
    "experts of other sizes": (lambda r: experts(r, *route(r, 2), [expert(8, 4), expert(8, 5)]), "experts of 8 numbers have"),
    "experts of another input": (lambda r: experts(r, *route(r, 2), [expert(7, 4)] * 8), "experts of 8 numbers have"),
    "too few": (lambda r: experts(r, *route(r, 2), [expert(8, 4)]), "experts of 8 numbers have"),
    "none": (lambda r: experts(r, *route(r, 2), []), "0 experts, of which 2 are chosen"),
    "an unknown function": (lambda r: experts(r, *route(r, 2), [expert(8, 4)] * 8, function="cube"), "8 experts"),
}  # fmt: skip


def expert(n, m):
    return Expert(None, torch.ones(m, n), torch.ones(n, m))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    build, message = REFUSED[case]
    with pytest.raises(ProgramError, match=message):
        build(Recorder().embed(torch.ones(3, 8)))


def recorded(n, m, num_experts, k, *, gated=True, groups=1):
    """A layer of experts with a residual connection, whose router reads exact numbers."""
    generator = torch.Generator().manual_seed(num_experts)

    def weight(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    x = Recorder().embed(eighths(3 * weight(40, n)))
    logits = product(x, eighths(4 * weight(num_experts, n)), exact=True)
    chosen, weights = route(logits, k, scores="sigmoid", bias=weight(num_experts), groups=groups)
    some = [Expert(weight(m, n) if gated else None, weight(m, n), weight(n, m)) for _ in range(num_experts)]
    y = norm(x + experts(x, chosen, weights, some), eps=1e-5)
    return x.record.head(y, weight(40, n))


@needs_kernels
@pytest.mark.parametrize(("num_experts", "k", "groups"), [(1, 1, 1), (5, 5, 1), (32, 2, 1), (66, 3, 3)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weights", FORMATS)
def test_compiled(num_experts, k, groups, weights, threads):
    """A long prompt in one block of rows that many share, steps, and company: one row's bits are its own."""
    program = recorded(20, 70, num_experts, k, groups=groups, gated=k < 3)
    ids = torch.randint(40, (2, 150), generator=torch.Generator().manual_seed(k))
    exact, _ = run(program, ids, new_states(program, 2), positions=[0, 0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runtime = Runtime(program, weights)
        logits, _ = runtime.prefill(ids, runtime.new_state(2), every=True)
        (alone,), _ = runtime.prefill(ids[1:, :3], state := runtime.new_state(1), every=True, inplace=True)
        more = [runtime(token[None], state, inplace=True)[0] for token in ids[1, 3:9]]
    finally:
        torch.set_num_threads(before)
    most = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05, "int4": 0.3}[weights]
    assert (logits - exact).square().mean().sqrt() < most * exact.square().mean().sqrt()
    assert torch.equal(torch.cat([alone, *more]), logits[1, :9])


def near_choice(dtype):
    """Two experts, x and −x. Token 0 chooses the second by a digit that bfloat16 does not have, and else the first of equals."""
    n, router = 64, torch.zeros(2, 64, dtype=dtype)
    router[:, 0] = torch.tensor([1, 1 + 2**-10])
    x = Recorder().embed(torch.eye(3, n))
    chosen, weights = route(product(x, router, exact=True), 1)
    y = experts(
        x, chosen, weights, [Expert(None, torch.eye(n), sign * torch.eye(n)) for sign in (1, -1)], function="relu"
    )
    return y.record.head(y, torch.eye(n))


@needs_kernels
@pytest.mark.parametrize("weights", FORMATS)
def test_a_router_keeps_its_digits(weights):
    """Routers in float32 and float16 choose by all of them; one in bfloat16 takes half the bytes, except among float32."""
    sizes = {}
    for dtype, sign in ((torch.float32, -1), (torch.float16, -1), (torch.bfloat16, 1)):
        runtime = Runtime(near_choice(dtype), weights)
        logits, _ = runtime(torch.tensor([0]), runtime.new_state(1))
        assert logits[0, 0].sign() == sign, (dtype, logits[0, :3])
        sizes[dtype] = runtime.nbytes
    assert sizes[torch.float32] == sizes[torch.float16]
    assert sizes[torch.float32] - sizes[torch.bfloat16] == (0 if weights == "float32" else 64 * 64 * 2)


@needs_kernels
def test_three_phases():
    """The router, experts, and the head; the embedding has the first."""
    assert Runtime(recorded(20, 70, 5, 2)).num_phases == 4


@needs_kernels
def test_numbers_that_are_none_stay_within_memory():
    """NaN and infinities in logits, and so in weights: other rows keep their bits."""
    record = Recorder()
    x = record.embed(torch.ones(3, 8))
    y = experts(x, *route(x, 3), [expert(8, 5)] * 8)
    runtime = Runtime(program := record.head(y, torch.eye(8)))
    table = runtime.packed.tables[0]
    expected, _ = runtime.prefill(torch.tensor([[0, 1, 2]]), runtime.new_state(1), every=True)
    for value in (float("nan"), float("inf"), -float("inf")):
        table[1] = value
        found, _ = runtime.prefill(torch.tensor([[0, 1, 2]]), runtime.new_state(1), every=True)
        assert not found[0, 1].isfinite().all()
        assert torch.equal(found[0, ::2], expected[0, ::2])
    assert program.num_outputs == 8
