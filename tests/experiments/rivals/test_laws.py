"""The laws that every rival keeps: padding, packing, causality, gradients, cost."""

from itertools import pairwise

import pytest
import torch
from support.cost import costs
from support.rivals import CAUSAL, ROWS, build, inputs, mixed

from experiments.rivals.graph import GraphAttention

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T = 19


def forms(rows):
    """(row, causal) of all forms."""
    return [
        (name, causal) for name, row in rows.items() for causal in (False, True) if (row.causal if causal else row.both)
    ]


@pytest.fixture(params=forms(ROWS), ids=lambda x: f"{x[0]}, {'causal' if x[1] else 'both sides'}")
def layer(request):
    name, causal = request.param
    return build(ROWS[name], causal)


def test_padding_is_cutting(layer):
    """On both sides and within; what stands at masked places reaches nothing, and nothing comes out there."""
    x, mask = inputs(3, T, 14), torch.ones(3, T, dtype=torch.bool)
    mask[0, :4] = mask[0, 17:] = mask[1, 11:] = mask[1, 5] = False
    if isinstance(layer, GraphAttention):  # a position is a node: to cut one would give those behind it other edges
        mask[0, :4] = mask[1, 5] = True
    y = layer(x.masked_fill(~mask[..., None], torch.nan), key_mask=mask)
    for row in range(3):
        alone = layer(x[row : row + 1, mask[row]])
        torch.testing.assert_close(y[row : row + 1, mask[row]], alone, **CLOSE)
    assert not y[~mask].any()


def test_rows_may_be_all_padding(layer):
    x, mask = inputs(2, 7, 14).requires_grad_(), torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    y = layer(x, key_mask=mask)
    assert not y[1].any()
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()


def test_packed_is_a_loop(layer):
    cuts = [0, 1, 1, 7, T]
    x = inputs(1, T, 14)
    y = layer(x, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for a, b in pairwise(cuts):
        if b > a:
            torch.testing.assert_close(y[:, a:b], layer(x[:, a:b]), **CLOSE)


def test_rows_do_not_mix(layer):
    x = inputs(3, T, 14)
    changed = x.clone()
    changed[1] += 1
    y, y2 = layer(x), layer(changed)
    assert torch.equal(y[[0, 2]], y2[[0, 2]])
    assert not torch.equal(y[1], y2[1])


@pytest.mark.parametrize("name", [name for name, row in CAUSAL.items() if row.to_the_bit])
def test_the_future_does_not_reach_the_past(name):
    """Causality to the bit."""
    layer, x, other = build(CAUSAL[name], causal=True), inputs(2, T, 14), inputs(2, T, 14, seed=2) * 100
    y = layer(x)
    for t in (1, 5, 12, 18):
        y2 = layer(torch.cat([x[:, :t], other[:, t:]], dim=1))
        assert torch.equal(y[:, :t], y2[:, :t])
        assert not torch.equal(y[:, t:], y2[:, t:])


@pytest.mark.parametrize("name", [name for name, row in CAUSAL.items() if not row.to_the_bit])
def test_no_later_value_reaches_the_past_but_later_keys_choose_what_it_sees(name):
    """As published: chunks of a sorted row, and clusters of one size, depend on the whole row."""
    layer, x, t = build(CAUSAL[name], causal=True), inputs(2, T, 14), 11
    q, k, v = layer.project(x, x)
    later, other = torch.cat([v[:, :, :t], 100 * v[:, :, t:]], dim=2), inputs(2, T, 14, seed=2)
    o, changed = (mixed(layer, x, q, k, y) for y in (v, later))
    assert torch.equal(o[:, :, :t], changed[:, :, :t])
    assert not torch.equal(o[:, :, t:], changed[:, :, t:])
    y = layer(x)
    others = {t: layer(torch.cat([x[:, :t], other[:, t:]], dim=1)) for t in range(6, T)}
    assert not all(torch.equal(y[:, :t], y2[:, :t]) for t, y2 in others.items())


def test_gradients_are_right(layer):
    """With some keys masked: of the input and of all parameters."""
    x, mask = inputs(2, 9, 14).requires_grad_(), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    parameters = [p for _, p in layer.named_parameters()]

    def f(x, *_):
        return layer(x, key_mask=mask)

    assert torch.autograd.gradcheck(f, (x, *parameters), fast_mode=True)


def test_every_parameter_learns(layer):
    (layer.train()(inputs(2, T, 14)) * torch.linspace(-1, 1, 14, dtype=torch.float64)).sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_shorter_than_its_blocks(layer):
    """Down to a single token, which can see only itself."""
    for t in (1, 2):
        assert layer(inputs(2, t, 14)).shape == (2, t, 14)


def test_low_precision_runs(layer):
    x = inputs(2, T, 14)
    exact = layer(x)
    y = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() < 0.5 * exact.norm()  # what is chosen may differ


def test_a_state_and_cross_attention_are_refused(layer):
    x = inputs(1, 3, 14)
    for call in (lambda: layer(x, return_state=True), lambda: layer.new_state(1), lambda: layer.step(x[:, :1], None)):
        with pytest.raises(ValueError, match=r"no step, no state and no cache. Call the model with use_cache=False"):
            call()
    with pytest.raises(ValueError, match="is self-attention: leave context_size out"):
        build(ROWS["lsh"], context_size=10)
    with pytest.raises(ValueError, match="cu_seqlens or key_mask, not both"):
        layer(x, key_mask=torch.ones(1, 3).bool(), cu_seqlens=torch.tensor([0, 3]))


LINEAR, ROOT = 4, 8  # growth of t and of t√t where tokens are four times as many
GROWTH = {  # of what is kept and of the largest tensor; options as functions of t
    "window": (LINEAR, LINEAR, lambda t: {"window": 32}),
    "lsh": (LINEAR, ROOT, lambda t: {"chunk": 16, "rounds": 2}),  # hashing looks at √(t / chunk) directions
    "sparse, strided": (ROOT, ROOT, lambda t: {"stride": int(t**0.5)}),
    "sparse, fixed": (ROOT, ROOT, lambda t: {"stride": int(t**0.5), "summaries": 1}),
    "longformer": (LINEAR, LINEAR, lambda t: {"reach": 16}),
    "bigbird": (LINEAR, LINEAR, lambda t: {"block": 16}),
    "routing": (ROOT, ROOT, lambda t: {"clusters": int(t**0.5), "reach": 16}),
    "low rank delta": (LINEAR, LINEAR, lambda t: {}),
    "clustered": (LINEAR, LINEAR, lambda t: {"clusters": 8}),
    "improved clustered": (LINEAR, LINEAR, lambda t: {"clusters": 8, "top_keys": 8}),
    "transformer-xl": (LINEAR, LINEAR, lambda t: {"segment": 16, "memory": 16}),
    "compressive": (LINEAR, LINEAR, lambda t: {"segment": 16, "memory": 16, "compressed": 16, "rate": 4}),
    "linformer": (LINEAR, LINEAR, lambda t: {"length": t}),
    "nystrom": (LINEAR, LINEAR, lambda t: {"landmarks": 8}),
    "hydra": (LINEAR, LINEAR, lambda t: {}),
    "graph of distances": (1.2 * LINEAR, 1.2 * LINEAR, lambda t: {}),  # t·log t
}


@pytest.mark.parametrize("name", GROWTH)
def test_memory_grows_as_it_should(name):
    """From 1k to 4k to 16k tokens: what is kept for the backward pass, and the largest tensor on the way."""
    kept, largest, options = GROWTH[name]
    sizes = [
        costs(build(ROWS[name], causal=not ROWS[name].both, **options(t)), inputs(1, t, 14))
        for t in (1024, 4096, 16384)
    ]
    for less, more in pairwise(sizes):
        assert 3.5 * less.kept < more.kept <= 1.1 * kept * less.kept
        assert more.largest <= 1.1 * largest * less.largest


def test_the_growth_of_a_matrix_would_be_seen():
    sizes = [costs(lambda x: (x @ x.mT).softmax(-1) @ x, inputs(1, t, 14)) for t in (256, 1024)]
    assert sizes[1].kept > 15 * sizes[0].kept
    assert sizes[1].largest == 16 * sizes[0].largest
