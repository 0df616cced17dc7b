"""Routers and experts: their definition against formulas token by token, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from tarnn.program.definition import new_states, run
from tarnn.program.experts import Expert, experts, route
from tarnn.program.recording import ProgramError, Recorder

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
