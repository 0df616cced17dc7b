"""The definition of the hybrid instruction against that of the op, which knows all tokens at once; its state is the op's."""

import pytest
import torch

from tarnn.families.maps import numbers_of
from tarnn.feature_maps.by_name import make
from tarnn.ops import hybrid_attention
from tarnn.ops.hybrid.definition import hybrid as all_at_once
from tarnn.program.definition import new_states, run
from tarnn.program.hybrid import REACHES, hybrid
from tarnn.program.recording import ProgramError, Recorder, heads

T, D, E, SHARED = 13, 4, 5, 2
MAPS = {
    "favor": {"num_features": 6, "centre": True, "balance": True},
    "hedgehog": {},
    "taylor": {},
    "clusters": {"num_features": 3},
}


def moved(phi):
    """The map with numbers that differ by head and are no zeros and ones."""
    phi, generator = phi.double().requires_grad_(False), torch.Generator().manual_seed(3)
    for name, x in phi.state_dict().items():
        if x.is_floating_point() and name not in ("omega", "feature_map.omega"):
            x += 0.3 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return phi


def opened(reach, phi, **options):
    """A program of hybrid attention alone, over rows that are q, k and v side by side."""
    g, record = len(reach), Recorder()
    sizes = (SHARED * g * D, g * D, g * E)
    x = record.embed(torch.zeros(1, sum(sizes)))
    q, k, v = (heads(y, n) for y, n in zip(x.split(*sizes), (SHARED * g, g, g), strict=True))
    sides = {} if phi is None else {side: numbers_of(phi, D, side) for side in ("queries", "keys")}
    o = hybrid(q, k, v, reach=reach, scale=D**-0.5, **sides, **options)
    return record.head(o, torch.eye(o.size))


def rows(g):
    generator = torch.Generator().manual_seed(g)
    return [
        torch.randn(1, n, T, d, generator=generator, dtype=torch.float64) for n, d in ((SHARED * g, D), (g, D), (g, E))
    ]


def computed(program, q, k, v, pieces=(T,)):
    x = torch.cat([y[0].movedim(0, 1).flatten(1) for y in (q, k, v)], 1)
    states, outputs, at = new_states(program, 1, dtype=torch.float64), [], 0
    for piece in x.split(pieces):
        ids = torch.zeros(1, len(piece), dtype=torch.int64)
        out, states = run(program, ids, states, positions=[at], extra=piece[None], dtype=torch.float64)
        outputs.append(out[0])
        at += len(piece)
    return torch.cat(outputs).unflatten(1, (-1, E)).movedim(0, 1), states[0]


def expected(reach, phi, q, k, v, *, window, sinks=0, far_until=None, far_bias=None):
    """Each key head by itself, from the weights of all pairs."""
    far, outputs = far_weights(reach, phi, q, k), []
    for i, kind in enumerate(reach):
        mine, weight = slice(SHARED * i, SHARED * (i + 1)), None
        if kind == "features":
            weight = next(far)
            weight = weight if far_bias is None else weight + far_bias[mine, None, None]
            late = torch.arange(T) >= (T if far_until is None else far_until)
            weight = weight.masked_fill(late[:, None], -torch.inf)[None]
        near = T if kind == "exact" else window
        some = (q[:, mine], k[:, i : i + 1], v[:, i : i + 1], weight)
        o, _ = all_at_once(*some, causal=True, window=near, sinks=sinks, scale=D**-0.5)
        outputs.append(o[0])
    return torch.cat(outputs)


def far_weights(reach, phi, q, k):
    """log φ(q)·φ(k) of each pair, (r, t, t), for one key head that reaches features after the other, by the map itself."""
    mine = [i for i, kind in enumerate(reach) if kind == "features"]
    if not mine:
        return iter(())
    q, k = q.unflatten(1, (-1, SHARED))[:, mine], k[:, mine]
    if phi.log_features:
        log_q, log_k = phi.log_queries(q.flatten(1, 2)).view(*q.shape[:4], -1), phi.log_keys(k)
        weight = (log_q[..., None, :] + log_k[:, :, None, None]).logsumexp(-1)
    else:
        (phi_q, scale_q), (phi_k, scale_k) = phi.queries(q.flatten(1, 2)), phi.keys(k)
        weight = (phi_q.view(*q.shape[:4], -1) @ phi_k[:, :, None].mT).log()
        if scale_q is not None:
            weight = weight + scale_q.view(q.shape[:4])[..., None] + scale_k[:, :, None, None]
    return iter(weight[0])


CASES = {
    "features": (["features", "features"], {"window": 3, "sinks": 2}),
    "no sinks, biased": (["features"], {"window": 2, "far_bias": torch.tensor([0.7, -1.1], dtype=torch.float64)}),
    "until": (["features", "features"], {"window": 2, "sinks": 1, "far_until": 9}),
    "windows": (["window", "window"], {"window": 4, "sinks": 1}),
    "all reaches": (
        ["exact", "features", "window", "features"],
        {"window": 3, "sinks": 1, "far_bias": torch.linspace(-1, 1, 8, dtype=torch.float64)},
    ),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("case", CASES)
def test_outputs(case, name):
    reach, options = CASES[case]
    phi = None
    if "features" in reach:
        seed = {"seed": 0} if name in ("favor", "clusters") else {}
        own = {"num_heads": reach.count("features")} if name != "taylor" else {}
        phi = moved(make(name, head_dim=D, **own, **seed, **MAPS[name]))
    q, k, v = rows(len(reach))
    logs = {"log_features": True} if phi is not None and phi.log_features else {}
    program = opened(reach, phi, **options, **logs)
    whole, after = computed(program, q, k, v)
    torch.testing.assert_close(whole, expected(reach, phi, q, k, v, **options), rtol=1e-9, atol=1e-9)
    pieces, last = computed(program, q, k, v, (1, 4, 0, 3, 5))
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(last, after, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*MAPS, None])
def test_the_state_is_that_of_the_op(name):
    phi = None
    if name is not None:
        seed = {"seed": 0} if name in ("favor", "clusters") else {}
        phi = moved(make(name, head_dim=D, **({"num_heads": 2} if name != "taylor" else {}), **seed, **MAPS[name]))
    q, k, v = rows(2)
    reach = ["window" if phi is None else "features"] * 2
    logs = {"log_features": True} if phi is not None and phi.log_features else {}
    program = opened(reach, phi, window=4, sinks=2, **logs)
    _, after = computed(program, q, k, v)
    _, state = hybrid_attention(q, k, v, phi, causal=True, window=4, sinks=2, return_state=True)
    for spec, x in zip(program.states, after, strict=True):
        torch.testing.assert_close(
            x.to(getattr(state, spec.name).dtype), getattr(state, spec.name)[0], rtol=1e-9, atol=1e-9
        )
    assert program.layers == ("HybridState",)


def test_states_are_declared_in_the_order_of_reaches():
    reach = ["exact", "features", "window", "features", "exact"]
    program = opened(reach, make("elu", head_dim=D), window=3, sinks=1)
    assert program.layers == ("HybridState", "HybridState", "KVCache")
    assert [(x.layer, x.name, x.shape) for x in program.states if x.name in "kS"] == [
        (0, "k", (2, 4, D)), (0, "S", (2, D, E)), (1, "k", (1, 4, D)), (1, "S", (1, 0, E)), (2, "k", (2, 0, D)),
    ]  # fmt: skip
    assert set(REACHES) == set(reach)


def test_what_does_not_fit_is_refused():
    phi = make("elu", head_dim=D)
    for reach, some in ((["window"], phi), (["features"], None)):
        with pytest.raises(ProgramError, match=r"hybrid attention of .* do not fit"):
            opened(reach, some, window=3)
    with pytest.raises(ProgramError, match="do not fit"):
        opened(["window"], None, window=0)
    with pytest.raises(ProgramError, match="weighs keys by their distance"):
        opened(["features"], make("cosformer", head_dim=D, max_length=9), window=2)
    record = Recorder()
    q, k, v = (heads(record.embed(torch.zeros(1, D)), 1) for _ in range(3))
    sides = {"queries": {"function": "elu"}, "keys": {"function": "halves"}}
    with pytest.raises(ProgramError, match="4 features of queries and 8 of keys"):
        hybrid(q, k, v, reach=["features"], scale=1.0, window=2, **sides)
