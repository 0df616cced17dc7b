"""Hybrid attention in the compiled runtime: every map and reach as defined; bits that depend on no place in the ring."""

import pytest
import torch
from program.test_hybrid import CASES, MAPS, SHARED, D, E, moved

from tarnn.families.maps import numbers_of
from tarnn.feature_maps.by_name import make
from tarnn.kernels.cpu import library
from tarnn.program import definition
from tarnn.program.hybrid import hybrid
from tarnn.program.recording import Recorder, heads, product, rotate
from tarnn.program.runtime import Runtime
from tarnn.program.state import tensors_of

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")
VOCABULARY = 31


def opened(reach, phi=None, scale=D**-0.5, **options):
    """A program of hybrid attention alone, over q, k and v that are the embeddings of tokens."""
    g, record, generator = len(reach), Recorder(), torch.Generator().manual_seed(len(reach))
    sizes = (SHARED * g * D, g * D, g * E)
    x = record.embed(torch.randn(VOCABULARY, sum(sizes), generator=generator))
    q, k, v = (heads(y, n) for y, n in zip(x.split(*sizes), (SHARED * g, g, g), strict=True))
    sides = {} if phi is None else {side: numbers_of(phi, D, side) for side in ("queries", "keys")}
    logs = {"log_features": True} if phi is not None and phi.log_features else {}
    o = hybrid(q, k, v, reach=reach, scale=scale, **sides, **options, **logs)
    return record.head(o, torch.eye(o.size))


def ids(n, seed=0):
    return torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def logits(runtime, tokens):
    return runtime.prefill(tokens[None], runtime.new_state(1, len(tokens)), every=True)[0][0]


def is_as_defined(program, tokens):
    states = definition.new_states(program, 1, dtype=torch.float64)
    (exact,), states = definition.run(program, tokens[None], states, positions=[0], dtype=torch.float64)
    runtime = Runtime(program)
    (mine,), after = runtime.prefill(tokens[None], runtime.new_state(1, len(tokens)), every=True)
    torch.testing.assert_close(mine.double(), exact, rtol=0, atol=2e-5 * float(exact.abs().max()))
    for spec, x, y in zip(program.states, tensors_of(after, program), states[0], strict=True):
        if spec.grows is None:  # those of caches have room behind them
            torch.testing.assert_close(x[0].double(), y.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("case", CASES)
def test_as_defined(case, name):
    reach, options = CASES[case]
    phi = None
    if "features" in reach:
        seed = {"seed": 0} if name in ("favor", "clusters") else {}
        own = {"num_heads": reach.count("features")} if name != "taylor" else {}
        phi = moved(make(name, head_dim=D, **own, **seed, **MAPS[name])).float()
    is_as_defined(opened(reach, phi, **options), ids(40))
    is_as_defined(opened(reach, phi, scale=0.3, **options), ids(3))


@pytest.mark.parametrize("reach", [["features"], ["window", "exact"]])
def test_several_blocks_of_keys(reach):
    """A window of more than one block of 512, and sinks before it."""
    phi = make("elu", head_dim=D) if "features" in reach else None
    is_as_defined(opened(reach, phi, window=600, sinks=3), ids(1300))


@pytest.mark.parametrize("window", [3, 32, 515])
def test_no_bit_depends_on_the_place_in_the_ring(window):
    """The same last tokens behind beginnings of several lengths give the same bits, wherever the ring has them."""
    runtime, last = Runtime(opened(["window"], window=window)), ids(window, 1)
    found = [logits(runtime, torch.cat([ids(n, n), last]))[-1] for n in (0, 1, window - 1, 2 * window // 3, 2 * window)]
    assert all(torch.equal(x, found[0]) for x in found)
    other = logits(runtime, torch.cat([ids(5), last.flip(0)]))[-1]
    assert not torch.equal(other, found[0])


def test_phases_are_those_of_softmax():
    """Projections, attention, what follows: one each, with norms and positions in them."""
    record = Recorder()
    x = record.embed(torch.randn(VOCABULARY, 8))
    q, k, v = (heads(product(x, torch.randn(8, 8)), 2) for _ in range(3))
    q, k = (rotate(y, torch.tensor([1.0, 0.1])) for y in (q, k))
    x = x + product(hybrid(q, k, v, reach=["window", "exact"], scale=0.5, window=3), torch.eye(8))
    assert Runtime(record.head(x, torch.randn(5, 8))).num_phases == 5


def test_counts_that_no_sequence_has_are_refused():
    runtime = Runtime(opened(["window", "window"], window=3))
    for count in (-1, -(2**63), 2**63 - 1):
        state = runtime.new_state(2)
        state.layers[0].count[1] = count
        with pytest.raises(ValueError, match="the states are not those of the program"):
            runtime(torch.tensor([1, 2]), state, inplace=True)
        assert state.layers[0].count.tolist() == [0, count]
        assert state.position.tolist() == [0, 0]
    state = runtime.new_state(2)
    runtime.prefill(
        torch.ones(2, 4, dtype=torch.int64), state, torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]), inplace=True
    )
    assert state.layers[0].count.tolist() == [3, 1]
