"""Linear attention with fewer heads of queries and keys than of values, and with a denominator of at least one."""

from itertools import product

import pytest
import torch
from support.chunks import tiny_chunks

from tarnn.kernels.cpu import library
from tarnn.ops import LinearState, linear_attention, step
from tarnn.ops.linear.definition import quadratic

BOTH = list(product((False, True), repeat=2))
MAPS = {"identity": lambda x: x, "exp": torch.exp, "elu": lambda x: torch.nn.functional.elu(x) + 1}


def drawn(h: int = 2, m: int = 6, t: int = 45, d: int = 5, e: int = 3, dtype: torch.dtype = torch.float64):
    """q, k, v, and a decay and a log-weight for each head of values."""
    tensors = [torch.randn(2, heads, t, width) for heads, width in ((h, d), (h, d), (m, e))]
    return [x.to(dtype).requires_grad_() for x in (*tensors, -torch.rand(2, m, t), torch.randn(2, m, t))]


def close(found, expected, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * expected.abs().max().clamp(min=1).item())


def compared(inputs, feature_map: str, rtol: float = 1e-9, **options) -> None:
    """Outputs and gradients, against the definition in float64."""
    q, k, v, log_decay, weight = inputs
    options["log_decay"], options["key_log_weight"] = (
        (log_decay if options.pop("decays") else None),
        (weight if options.pop("weighted") else None),
    )
    used = [x for x in (q, k, v, options["log_decay"], options["key_log_weight"]) if x is not None]
    o = linear_attention(q, k, v, feature_map, **options)
    wide = [x.detach().double().requires_grad_() for x in used]
    each = iter(wide[3:])
    given = {name: next(each) if options[name] is not None else None for name in ("log_decay", "key_log_weight")}
    phi = MAPS[feature_map]
    expected = quadratic(phi(wide[0]), phi(wide[1]), wide[2], **{**options, **given})
    close(o.double(), expected, rtol)
    sent = torch.randn_like(expected)
    for x, y in zip(torch.autograd.grad(o, used, sent.to(o.dtype)), torch.autograd.grad(expected, wide, sent)):
        close(x.double(), y, rtol)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize(("decays", "weighted"), BOTH)
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_values(chunks, feature_map, decays, weighted, causal):
    if decays and not causal:
        pytest.skip("without causality there is no decay")
    compared(drawn(), feature_map, causal=causal, normalize=feature_map != "identity", decays=decays, weighted=weighted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("h", "m"), [(1, 5), (3, 12), (2, 2)])
def test_grouped_values_in_other_dtypes(dtype, h, m):
    rtol = 2e-5 if dtype == torch.float32 else 0.05
    compared(drawn(h, m, 70, 16, 16, dtype), "elu", rtol, causal=True, normalize=True, decays=True, weighted=False)


@pytest.mark.parametrize("m", [4, 24])
def test_groups_that_several_tasks_share(monkeypatch, m):
    """Groups of one, of a part, and of all heads in a task have the same gradients, but for rounding."""
    from tarnn.kernels.cpu import linear

    found = []
    for room in (1, 6 * 2 * 4 * 5 * 8, 1 << 20):
        monkeypatch.setattr(linear, "STATES_TOGETHER", room)
        torch.manual_seed(0)
        inputs = drawn(2, m)
        o = linear_attention(*inputs[:3], "identity", causal=True, normalize=False, log_decay=inputs[3])
        found.append(torch.autograd.grad(o.square().sum(), inputs[:4]))
    for others in found[1:]:
        for x, y in zip(found[0], others):
            close(x, y, 1e-11)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize(("decays", "weighted"), BOTH)
@pytest.mark.parametrize("causal", [True, False])
def test_at_least_one(chunks, feature_map, decays, weighted, causal):
    """Both ways: where the sum is larger, and where one is."""
    if decays and not causal:
        pytest.skip("without causality there is no decay")
    q, k, *others = drawn(2, 6 if causal else 2, 45)
    scaled = [(0.3 * x).detach().requires_grad_() for x in (q, k)]
    compared([*scaled, *others], feature_map, causal=causal, normalize="at_least_one", decays=decays, weighted=weighted)


def test_at_least_one_of_large_and_small_weights():
    """The sums are in units of e^M, and one is not; no query, no key or a sum of zero divides nothing by zero."""
    q, k, v, _, _ = (x.detach() for x in drawn(2, 2, 20))
    q, k = q.abs(), k.abs()  # so that sums don't cancel
    for size in (-150.0, -20.0, 0.0, 20.0):
        weight = torch.full((2, 2, 20), size, dtype=torch.float64)
        o = linear_attention(q, k, v, "identity", causal=True, normalize="at_least_one", key_log_weight=weight)
        expected = quadratic(q, k, v, causal=True, normalize="at_least_one", key_log_weight=weight)
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=0)
        narrow = [x.float() for x in (q, k, v, weight)]
        o = linear_attention(*narrow[:3], "identity", causal=True, normalize="at_least_one", key_log_weight=narrow[3])
        assert o.isfinite().all()
        assert (o.double() - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-37
    nothing = torch.zeros_like(q)
    weight = torch.full((2, 2, 20), 200.0)
    narrow = [x.float() for x in (nothing, k, v)]
    o = linear_attention(*narrow, "identity", causal=True, normalize="at_least_one", key_log_weight=weight)
    assert (o == 0).all()
    masked = linear_attention(
        q, k, v, "identity", causal=True, normalize="at_least_one", key_mask=torch.zeros(2, 20, dtype=torch.bool)
    )
    assert (masked == 0).all()


@pytest.mark.parametrize("options", [{"normalize": False}, {"normalize": "at_least_one"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_steps(options, dtype, inplace):
    q, k, v, log_decay, weight = (x.detach() for x in drawn(2, 6, 9, dtype=dtype))
    given = {"log_decay": log_decay, "key_log_weight": weight}
    whole, behind = linear_attention(q, k, v, "identity", causal=True, return_state=True, **given, **options)
    state, outputs = LinearState.zeros(2, 6, 5, 3, log_weights=True, dtype=dtype), []
    for i in range(9):
        one = [x[:, :, i : i + 1] for x in (q, k, v)]
        each = {name: x[:, :, i : i + 1] for name, x in given.items()}
        o, state = step(*one, "identity", state, inplace=inplace, **each, **options)
        outputs.append(o)
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    close(torch.cat(outputs, 2), whole, rtol)
    for x, y in zip(state.tensors().values(), behind.tensors().values()):
        close(x, y, rtol)


@pytest.mark.thorough
@pytest.mark.parametrize("normalize", [False, True, "at_least_one"])
def test_both_derivatives(normalize):
    q, k, v, log_decay, weight = (x.detach()[:1, :, :6].requires_grad_() for x in drawn(1, 2))

    def f(*x):
        options = {"log_decay": x[3], "key_log_weight": x[4]}
        return linear_attention(*x[:3], "exp", causal=True, normalize=normalize, **options)

    assert torch.autograd.gradcheck(f, (q, k, v, log_decay, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (q, k, v, log_decay, weight), fast_mode=True)


def test_no_head_is_repeated_in_memory():
    """Where kernels take them, q and k have the bits of repeated ones, and gradients their sums."""
    if not library.available():
        pytest.skip(library.status().why)
    inputs = [x.detach().requires_grad_() for x in drawn(2, 6, 70, dtype=torch.float32)]
    q, k, v, log_decay, _ = inputs
    with tiny_chunks():
        o = linear_attention(q, k, v, "identity", causal=True, normalize=False, log_decay=log_decay)
        repeated = [x.repeat_interleave(3, 1) for x in (q, k)]
        expected = linear_attention(*repeated, v, "identity", causal=True, normalize=False, log_decay=log_decay)
    assert torch.equal(o, expected)
