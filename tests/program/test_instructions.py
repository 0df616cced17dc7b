"""Each instruction of the definition against an independent formula, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tarnn.feature_maps.by_name import make
from tarnn.ops.delta import definition as delta_definition
from tarnn.ops.linear import definition as linear_definition
from tarnn.ops.scan import definition as scan_definition
from tarnn.program.definition import new_states, run
from tarnn.program.recording import (
    ProgramError,
    Recorder,
    apply,
    clamp,
    concat,
    delta,
    features,
    filter,
    head_product,
    heads,
    linear,
    low_rank_delta,
    mix,
    norm,
    product,
    products,
    rotate,
    softmax,
)
from tarnn.program.scans import diagonal_scan, selective_scan

T, START = 7, 5  # tokens, and the first one's position
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def compute(x, build):
    """Run a program of which `build` records the middle, on rows x (t, n)."""
    record = Recorder()
    y = build(record, record.embed(torch.zeros(1, x.shape[1])))
    program = record.head(y, torch.eye(y.size))
    ids, states = torch.zeros(1, len(x), dtype=torch.int64), new_states(program, 1, dtype=torch.float64)
    out, _ = run(program, ids, states, positions=[START], extra=x[None], dtype=torch.float64)
    return out[0]


def parts(x, *shapes):
    """Consecutive channels of x (t, n) as (t, heads, width) each."""
    sizes = [h * d for h, d in shapes]
    return [y.unflatten(1, shape) for y, shape in zip(x.split(sizes, 1), shapes, strict=True)]


def recorded(x, *shapes):
    """The same, of a register."""
    return [heads(y, h) for y, (h, _) in zip(x.split(*[h * d for h, d in shapes]), shapes, strict=True)]


X = randn(T, 12)
W, B, GAIN = randn(5, 12), randn(5), randn(12)
BLOCKS, BIAS = randn(2, 3, 12), randn(4)
HEADED = randn(3, 5, 4), randn(3, 5)
MU, TAPS = randn(2, 12), randn(12, 3)
OMEGA, MAP_BIAS = randn(3, 6, 4), randn(3, 6)


def turned(x, frequencies, interleaved):
    """Rotary positions by complex numbers, x (t, h, d)."""
    p = len(frequencies)
    first, rest = x[..., : 2 * p], x[..., 2 * p :]
    pairs = first.unflatten(-1, (p, 2)) if interleaved else first.unflatten(-1, (2, p)).mT
    angles = (START + torch.arange(T))[:, None, None] * frequencies
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    back = torch.view_as_real(z)
    return torch.cat([back.flatten(-2) if interleaved else back.mT.flatten(-2), rest], -1).flatten(1)


F64, F32 = torch.tensor([1.0, 0.3]).double(), torch.tensor([1.0, 0.3])
SIMPLE = {
    "product": (lambda r, x: product(x, W, B), lambda x: x @ W.T + B),
    "a product of blocks": (
        lambda r, x: product(x, BLOCKS[:, 1:], BIAS),
        lambda x: torch.stack([x @ w for b in BLOCKS for w in b[1:]], 1) + BIAS,
    ),
    "products behind one another": (lambda r, x: products(x, W, BLOCKS), lambda x: x @ torch.cat([W, BLOCKS.flatten(0, 1)]).T),
    "clamp": (lambda r, x: clamp(x, -0.5, 0.25), lambda x: x.minimum(torch.tensor(0.25)).maximum(torch.tensor(-0.5))),
    "concat": (
        lambda r, x: concat(heads(x, 3), heads(x.split(3, 9)[1], 3), heads(x.split(3, 9)[0], 3)),
        lambda x: torch.cat([y.unflatten(1, (3, -1)) for y in (x, x[:, 3:], x[:, :3])], 2).flatten(1),
    ),
    "head_product": (
        lambda r, x: head_product(heads(x, 3), *HEADED),
        lambda x: torch.einsum("hon,thn->tho", HEADED[0], x.unflatten(1, (3, 4))).add(HEADED[1]).flatten(1),
    ),
    "rms": (lambda r, x: norm(x, GAIN, eps=1e-2), lambda x: F.rms_norm(x, (12,), GAIN, 1e-2)),
    "layer": (
        lambda r, x: norm(x, GAIN, X[0], eps=1e-2, kind="layer"),
        lambda x: F.layer_norm(x, (12,), GAIN, X[0], 1e-2),
    ),
    "rms of heads": (
        lambda r, x: norm(heads(x, 3), GAIN[:4], eps=1e-2),
        lambda x: F.rms_norm(x.unflatten(1, (3, 4)), (4,), GAIN[:4], 1e-2).flatten(1),
    ),
    "groups with gains of all channels": (
        lambda r, x: norm(heads(x, 3), GAIN, eps=1e-2),
        lambda x: F.rms_norm(x.unflatten(1, (3, 4)), (4,), None, 1e-2).flatten(1) * GAIN,
    ),
    "l2": (lambda r, x: norm(x, eps=1e-2, kind="l2"), lambda x: x * (x @ x.T).diag().add(1e-2).rsqrt()[:, None]),
    "length": (lambda r, x: norm(x, eps=4.0, kind="length"), lambda x: F.normalize(x, eps=4.0)),
    "add": (lambda r, x: x + product(x, W.repeat(3, 1)[:12]), lambda x: x + x @ W.repeat(3, 1)[:12].T),
    "mul by a number per head": (
        lambda r, x: heads(x, 3) * x.split(3, 9)[0],
        lambda x: (x.unflatten(1, (3, 4)) * x[:, :3, None]).flatten(1),
    ),
    "mul by one number": (lambda r, x: x * x.split(1, 11)[0], lambda x: x * x[:, :1]),
    "add a vector": (lambda r, x: x + GAIN, lambda x: x + GAIN),
    "mul each head": (
        lambda r, x: heads(x, 3) * GAIN[:3, None],
        lambda x: (x.unflatten(1, (3, 4)) * GAIN[:3, None]).flatten(1),
    ),
    "mul by a weight per channel of a head": (
        lambda r, x: heads(x, 3) * GAIN[:4],
        lambda x: (x.unflatten(1, (3, 4)) * GAIN[:4]).flatten(1),
    ),
    "a number": (lambda r, x: 3 * x + 0.5, lambda x: 3 * x + 0.5),
    "half rotation": (lambda r, x: rotate(heads(x, 2), F64), lambda x: turned(x.unflatten(1, (2, 6)), F64, False)),
    "interleaved": (
        lambda r, x: rotate(heads(x, 3), F64, interleaved=True),
        lambda x: turned(x.unflatten(1, (3, 4)), F64, True),
    ),
    "silu": (lambda r, x: apply(x, "silu"), lambda x: x / (1 + (-x).exp())),
    "gelu": (lambda r, x: apply(x, "gelu"), lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu_tanh": (
        lambda r, x: apply(x, "gelu_tanh"),
        lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "relu": (lambda r, x: apply(x, "relu"), lambda x: torch.where(x > 0, x, 0)),
    "squared_relu": (lambda r, x: apply(x, "squared_relu"), lambda x: torch.where(x > 0, x * x, 0)),
    "sigmoid": (lambda r, x: apply(x, "sigmoid"), lambda x: 1 / (1 + (-x).exp())),
    "tanh": (lambda r, x: apply(x, "tanh"), lambda x: 1 - 2 / ((2 * x).exp() + 1)),
    "softplus": (lambda r, x: apply(x * 9, "softplus"), lambda x: torch.where(9 * x > 20, 9 * x, (9 * x).exp().log1p())),
    "exp": (lambda r, x: apply(x, "exp"), torch.exp),
    "neg": (lambda r, x: apply(x, "neg"), lambda x: 0 - x),
    "log_sigmoid": (lambda r, x: apply(x, "log_sigmoid"), lambda x: (1 / (1 + (-x).exp())).log()),
    "identity": (lambda r, x: apply(x, "identity"), lambda x: x),
    "mix": (
        lambda r, x: mix(x, MU, r.state("RWKV7State"))[1],
        lambda x: torch.lerp(x, torch.cat([0 * x[:1], x[:-1]]), MU[1]),
    ),
    "filter": (
        lambda r, x: filter(x, TAPS, r.state("ConvolutionState"), GAIN, function="tanh"),
        lambda x: F.conv1d(F.pad(x.T, (2, 0)), TAPS[:, None], GAIN, groups=12).T.tanh(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMPLE)
def test_instruction(name):
    build, formula = SIMPLE[name]
    torch.testing.assert_close(compute(X, build), formula(X), rtol=1e-12, atol=1e-12)


def test_one_head_is_read_by_all():
    weight = randn(3, 2, 12)
    out = compute(X, lambda r, x: head_product(x, weight))
    torch.testing.assert_close(out, X @ weight.flatten(0, 1).T)


def test_frequencies_in_float32_round_the_angles():
    out = compute(X, lambda r, x: rotate(heads(x, 2), F32))
    positions = (START + torch.arange(T, dtype=torch.float32))[:, None]
    angles = (positions * F32).double()[:, None]
    x = X.unflatten(1, (2, 6))
    first = x[..., :2] * angles.cos() - x[..., 2:4] * angles.sin()
    torch.testing.assert_close(out.unflatten(1, (2, 6))[..., :2], first, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(out, turned(x, F32.double(), False), rtol=1e-9, atol=1e-9)


def test_embedding():
    tokens, places, extra = randn(9, 4), randn(11, 3), randn(T, 6)
    record = Recorder()
    x = record.embed(tokens, scale=2.5, places=places, width=6)
    program = record.head(x, torch.eye(6))
    ids = torch.randint(0, 9, (1, T), generator=GENERATOR)
    states = new_states(program, 1)
    out, _ = run(program, ids, states, positions=[2], extra=extra[None], dtype=torch.float64)
    expected = extra + F.pad(tokens[ids[0]] * 2.5, (0, 2)) + F.pad(places[2 : 2 + T], (3, 0))
    torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize(("q_heads", "k_heads"), [(3, 3), (6, 2), (4, 1)])
def test_softmax(q_heads, k_heads):
    shapes = (q_heads, 4), (k_heads, 4), (k_heads, 5)
    x = randn(T, sum(h * d for h, d in shapes))
    out = compute(x, lambda r, y: softmax(*recorded(y, *shapes), r.state("KVCache"), scale=0.7))
    q, k, v = (y.transpose(0, 1) for y in parts(x, *shapes))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(0, 1).flatten(1))


HEADS = {"plain": (3, 3, 3), "grouped keys": (6, 3, 3), "grouped values": (2, 2, 6)}
DECAYS = {"none": None, "head": ..., "token": 1, "feature": 4}


@pytest.mark.parametrize("grouping", HEADS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear(grouping, decay, weighted, normalize):
    h, g, m = HEADS[grouping]
    n, width = max(g, m), DECAYS[decay]
    shapes = [(h, 4), (g, 4), (m, 5), (g, 1), (n, 4)]
    x = randn(T, sum(a * b for a, b in shapes))
    x = torch.where(torch.arange(x.shape[1]) < (h + g) * 4, x.abs(), x)
    per_head = -randn(n).abs()

    def build(record, register):
        q, k, v, w, d = recorded(register, *shapes)
        d = apply(d, "softplus") * -0.3
        if width == 1:
            d = heads(product(d, torch.eye(n * 4)[::4]), n)
        log_decay = {None: None, ...: per_head}.get(width, d)
        scales = {"k_scale": w * 3} if weighted else {}
        return linear(q, k, v, record.state("LinearState"), log_decay=log_decay, normalize=normalize, **scales)

    q, k, v, w, d = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    d = -0.3 * F.softplus(d)
    log_decay = {None: None, ...: per_head, 1: d[..., 0], 4: d}[width]
    weight = (3 * w[..., 0]).repeat_interleave(n // g, 1) if weighted else None
    expected = linear_definition.quadratic(
        q, k, v, causal=True, normalize=normalize, log_decay=log_decay, key_log_weight=weight
    )
    torch.testing.assert_close(compute(x, build), expected[0].transpose(0, 1).flatten(1))


def test_linear_without_denominators_keeps_one_state():
    shapes = [(3, 4), (3, 4), (3, 5)]
    x = randn(T, 39)
    record = Recorder()
    register = record.embed(torch.zeros(1, 39))
    y = linear(*recorded(register, *shapes), record.state("Mamba2State"), normalize=False, keep_z=False)
    assert [spec.shape for spec in record.states] == [(3, 4, 5)]
    program = record.head(y, torch.eye(15))
    ids, states = torch.zeros(1, T, dtype=torch.int64), new_states(program, 1, dtype=torch.float64)
    out, ((S,),) = run(program, ids, states, positions=[0], extra=x[None], dtype=torch.float64)
    q, k, v = (y.transpose(0, 1) for y in parts(x, *shapes))
    torch.testing.assert_close(S, k.mT @ v)
    expected = linear_definition.quadratic(q[None], k[None], v[None], causal=True, normalize=False)
    torch.testing.assert_close(out[0], expected[0].transpose(0, 1).flatten(1))


def test_linear_with_other_keys_below():
    """Numerators of rotated features, denominators of plain ones, in units of one logarithm each."""
    shapes = [(6, 4), (3, 4), (3, 5), (6, 4), (3, 4), (6, 1)]
    x = randn(T, sum(a * b for a, b in shapes))

    def build(record, register):
        q, k, v, low_q, low_k, u = recorded(register, *shapes)
        below = (apply(low_q, "exp"), apply(low_k, "exp"))
        return linear(q, k, v, record.state("LinearState"), denominator=below, q_scale=u, eps=0.25)

    q, k, v, low_q, low_k, _ = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    above = linear_definition.quadratic(q, k, v, causal=True, normalize=False)
    ones = torch.ones_like(v[..., :1])
    below = linear_definition.quadratic(low_q.exp(), low_k.exp(), ones, causal=True, normalize=False)
    expected = above / (below + 0.25)
    torch.testing.assert_close(compute(x, build), expected[0].transpose(0, 1).flatten(1))


def test_logarithms_apart_do_not_overflow():
    """Keys e^700 apart from queries e^−700: only their product has a place in float64."""
    shapes = [(1, 2), (1, 2), (1, 3), (1, 1)]
    x = randn(T, 8)
    out = compute(x, lambda r, y: _far(r, *recorded(y, *shapes)))
    q, k, v, _ = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    expected = linear_definition.quadratic(q, k, v, causal=True, normalize=False)
    torch.testing.assert_close(out, expected[0].transpose(0, 1).flatten(1))


def _far(record, q, k, v, zero):
    far = zero * 0 + 700
    return linear(q, k, v, record.state("LinearState"), k_scale=far, q_scale=far * -1, normalize=False)


@pytest.mark.parametrize("grouping", [(2, 2, 6), (6, 3, 3), (3, 3, 3)])
@pytest.mark.parametrize("decay", DECAYS)
def test_delta(grouping, decay):
    h, g, m = grouping
    n, width = max(g, m), DECAYS[decay]
    shapes = [(h, 4), (g, 4), (m, 5), (n, 1), (n, 1 if width == 1 else 4)]
    x = randn(T, sum(a * b for a, b in shapes)) / 2
    per_head = -randn(n).abs()

    def build(record, register):
        q, k, v, beta, d = recorded(register, *shapes)
        log_decay = {None: None, ...: per_head}.get(width, apply(apply(d, "softplus"), "neg"))
        return delta(q, k, v, apply(beta, "sigmoid"), record.state("GatedDeltaState"), log_decay=log_decay)

    q, k, v, beta, d = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    log_decay = {None: None, ...: per_head, 1: -F.softplus(d[..., 0]), 4: -F.softplus(d)}[width]
    expected = delta_definition.quadratic(q, k, v, beta[..., 0].sigmoid(), scale=1.0, log_decay=log_decay)
    torch.testing.assert_close(compute(x, build), expected[0].transpose(0, 1).flatten(1))


def test_low_rank_delta():
    shapes = [(3, 4)] * 6
    x = randn(T, 72) / 2

    def build(record, register):
        r, d, k, v, a, b = recorded(register, *shapes)
        return low_rank_delta(r, apply(apply(d, "softplus"), "neg"), k, v, a, b, record.state("RWKV7State"))

    r, d, k, v, a, b = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    expected, _ = delta_definition.low_rank_delta(r, k, v, a, b, log_decay=-F.softplus(d), scale=1.0)
    torch.testing.assert_close(compute(x, build), expected[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("grouping", HEADS)
def test_linear_by_at_least_one(grouping):
    """mLSTM: a denominator of either sign, whose size is one or more in true units."""
    h, g, m = HEADS[grouping]
    n = max(g, m)
    shapes = [(h, 4), (g, 4), (m, 5), (g, 1), (n, 1)]
    x = randn(T, sum(a * b for a, b in shapes))

    def build(record, register):
        q, k, v, w, d = recorded(register, *shapes)
        d, state = apply(d, "log_sigmoid"), record.state("LinearState")
        return linear(q, k, v, state, log_decay=d, k_scale=w * 3, at_least_one=True, eps=1e-9)

    q, k, v, w, d = (y.transpose(0, 1)[None] for y in parts(x, *shapes))
    weight = (3 * w[..., 0]).repeat_interleave(n // g, 1)
    options = {"causal": True, "normalize": False, "log_decay": F.logsigmoid(d[..., 0]), "key_log_weight": weight}
    above, below = (linear_definition.quadratic(q, k, y, **options) for y in (v, torch.ones_like(v)))
    assert (below.abs() < 1).any()
    assert (below < -1).any()
    expected = above / below.abs().clamp(min=1)
    torch.testing.assert_close(compute(x, build), expected[0].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [1, 3])
def test_selective_scan(n):
    shapes = [(n, 5), (n, 5), (n, 4), (n, 4)]
    x, A = randn(T, n * 18), -randn(n * 5, 4).abs()

    def build(record, register):
        u, dt, B, C = recorded(register, *shapes)
        return selective_scan(u, apply(dt, "softplus"), B, C, A, record.state("FilteredScanState"))

    u, dt, B, C = parts(x, *shapes)
    of_heads = zip(u.unbind(1), F.softplus(dt).unbind(1), A.split(5), B.unbind(1), C.unbind(1), strict=True)
    expected = [
        scan_definition.selective_scan(a[None], b[None], r, c[None], d[None])[0][0] for a, b, r, c, d in of_heads
    ]
    torch.testing.assert_close(compute(x, build), torch.cat(expected, 1))


@pytest.mark.parametrize("start", [0, START])
def test_diagonal_scan(start):
    """By √(1 − e^2a) all tokens but the first of a sequence."""
    x = randn(T, 10)
    record = Recorder()
    inputs, a = record.embed(torch.zeros(1, 10)).split(5, 5)
    a = apply(apply(a, "softplus"), "neg")
    plain = diagonal_scan(inputs, a, record.state("ScanState"))
    y = diagonal_scan(inputs, a, record.state("ScanState"), normalize=True)
    program = record.head(plain + y * 2, torch.eye(5))
    ids, states = torch.zeros(1, T, dtype=torch.int64), new_states(program, 1, dtype=torch.float64)
    out, _ = run(program, ids, states, positions=[start], extra=x[None], dtype=torch.float64)
    inputs, a = x[None, :, :5], -F.softplus(x[None, :, 5:])
    factor = (1 - (2 * a).exp()).sqrt()
    if start == 0:
        factor[:, 0] = 1
    plain, _ = scan_definition.diagonal_scan(inputs, a)
    expected = plain + 2 * scan_definition.diagonal_scan(inputs * factor, a)[0]
    torch.testing.assert_close(out, expected)


def test_outputs_with_a_soft_cap():
    x, (a, b) = randn(T, 6), (randn(4, 6), randn(4))
    record = Recorder()
    program = record.head(record.embed(torch.zeros(1, 6)), a, b, softcap=1.5)
    ids = torch.zeros(1, T, dtype=torch.int64)
    out, _ = run(program, ids, new_states(program, 1), positions=[0], extra=x[None], dtype=torch.float64)
    torch.testing.assert_close(out[0], 1.5 * torch.tanh((x @ a.mT + b) / 1.5))


def test_difference():
    x = randn(T, 6)

    def build(_, register):
        a, b = register.split(3, 3)
        return (1 - a) - b - 0.5

    torch.testing.assert_close(compute(x, build), 0.5 - x[:, :3] - x[:, 3:])


def of_map(name, **options):
    """φ of a map of `tarnn.feature_maps`, as features times e^logarithm."""
    phi = make(name, head_dim=4, **options).double()

    def formula(x):
        found, scale = phi.scaled(x)
        return found if scale is None else found * scale.exp()[..., None]

    return phi, formula


def random_map(name, **options):
    phi, formula = of_map(name, num_features=6, seed=3, **options)
    return phi.omega[None], formula


TAYLOR, POLY = of_map("taylor"), of_map("polynomial2", offset=0.7)
FAVOR, FAVOR_FORMULA = random_map("generalized_random", function="exp", epsilon=1e-2)
TRIG, TRIG_FORMULA = random_map("trigonometric")
ROOT = 6**-0.5
FUNCTIONS = {
    "elu": ("elu", {}, of_map("elu")[1]),
    "dpfp": ("dpfp", {"number": 3}, of_map("dpfp", nu=3)[1]),
    "pairs of Taylor": ("pairs", {"parts": (1.0, 0.5**0.5, 0.5**0.5 * 0.5, 0.5, 0.0, 0.0)}, TAYLOR[1]),
    "pairs of a polynomial": ("pairs", {"parts": (0.0, 0.0, 1.0, 2**0.5, 1.4**0.5, 0.7)}, POLY[1]),
    "exp, not below 0": (
        "exp", {"omega": FAVOR, "gain": ROOT, "shift": ROOT * 1e-2, "number": 0.0}, FAVOR_FORMULA,
    ),
    "waves": ("waves", {"omega": TRIG * 0.5**0.5, "square": -0.25, "gain": 3**-0.5}, TRIG_FORMULA),
    "halves": (
        "halves", {"omega": OMEGA},
        lambda x: torch.cat([torch.einsum("hmd,thd->thm", s * OMEGA, x).softmax(-1) for s in (1, -1)], -1),
    ),
    "log_softmax": (
        "log_softmax", {"omega": OMEGA, "bias": MAP_BIAS},
        lambda x: (torch.einsum("hmd,thd->thm", OMEGA, x) + MAP_BIAS).log_softmax(-1),
    ),
    "relu": ("relu", {"omega": OMEGA, "shift": 0.1}, lambda x: torch.einsum("hmd,thd->thm", OMEGA, x).relu() + 0.1),
    "exp of squares": (
        "exp", {"square": 0.5, "offset": 0.25},
        lambda x: (x - x.square().sum(-1, keepdim=True) / 2 + 0.25).exp(),
    ),
    "cosformer": (
        "cosformer", {"number": 0.1},
        lambda x: torch.cat([x.relu() * f(0.1 * (START + torch.arange(T)))[:, None, None] for f in (torch.cos, torch.sin)], -1),
    ),
    "abs": ("abs", {}, torch.abs), "cos": ("cos", {}, torch.cos), "plain_exp": ("plain_exp", {}, torch.exp),
    "sigmoid": ("sigmoid", {}, torch.sigmoid), "squared_relu": ("squared_relu", {}, lambda x: x.relu() ** 2),
    "identity": ("identity", {"gain": 2.0}, lambda x: 2 * x), "gelu": ("gelu", {}, F.gelu),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("moved", [False, True])
def test_features(name, moved):
    function, options, formula = FUNCTIONS[name]
    move = (
        {"centre": randn(3, 4), "stretch": randn(3, 4), "weight": randn(3, 4), "constant": randn(3)} if moved else None
    )

    def build(record, x):
        phi, scale = features(heads(x, 3), function, move=move, **options)
        return phi * apply(scale, "exp")

    x, factor = X.unflatten(1, (3, 4)), 1.0
    if move is not None:
        factor = ((move["weight"] * x).sum(-1) + move["constant"]).exp()[..., None]
        x = (x - move["centre"]) * move["stretch"]
    torch.testing.assert_close(compute(X, build), (formula(x) * factor).flatten(1))


def test_a_map_of_one_head_is_of_all_and_groups_share_theirs():
    out = compute(X, lambda r, x: features(heads(x, 3), "identity", omega=OMEGA[:1])[0])
    torch.testing.assert_close(out, torch.einsum("md,thd->thm", OMEGA[0], X.unflatten(1, (3, 4))).flatten(1))
    out = compute(X, lambda r, x: features(heads(x, 6), "identity", omega=OMEGA[..., :2], bias=MAP_BIAS)[0])
    omega, bias = OMEGA[..., :2].repeat_interleave(2, 0), MAP_BIAS.repeat_interleave(2, 0)
    torch.testing.assert_close(out, (torch.einsum("hmd,thd->thm", omega, X.unflatten(1, (6, 2))) + bias).flatten(1))


def test_an_exponential_is_kept_in_range():
    out = compute(1000 * X, lambda r, x: features(x, "exp")[0])
    assert (out.amax(1) == 1).all()


WRONG = {
    "a product's width": (lambda r, x: product(x, randn(5, 11)), "a product reads 11 numbers, and gets 12"),
    "a weight that would widen": (lambda r, x: x * randn(12, 1), "mul of 1 × 12 numbers and a weight"),
    "a weight of another size": (lambda r, x: heads(x, 3) + randn(6), "add of 3 × 4 numbers and a weight"),
    "a function": (lambda r, x: apply(x, "sinh"), "sinh is none of identity, silu"),
    "a split": (lambda r, x: x.split(5, 6)[0], r"12 numbers can't be split into \(5, 6\)"),
    "heads": (lambda r, x: heads(x, 5), "12 numbers are no 5 heads"),
    "too many rotated": (lambda r, x: rotate(heads(x, 6), F64), "4 channels of 2 can't be rotated"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_shapes_that_do_not_fit_are_refused(kind):
    build, message = WRONG[kind]
    with pytest.raises(ProgramError, match=message):
        compute(X, build)
