"""Global tokens of hybrid attention: all see them, and they see all, exactly."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tarnn
from tarnn.kernels.cpu import library
from tarnn.ops import softmax_attention
from tarnn.ops.hybrid.op import hybrid_attention

PHI = tarnn.PositiveRandomFeatures(4, 8, seed=1)
T = 150
pytestmark = pytest.mark.one_path


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def computed_by(request):
    if request.param == "compiled":
        yield
        return
    with library.disabled():
        yield


def tensors(b=2, g=2, r=2, t=T, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = (b, g * r, t, 4), (b, g, t, 4), (b, g, t, 5)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def both_sides(q, k, v, phi=PHI, **options):
    return hybrid_attention(q, k, v, phi, **{"causal": False, "window": 7} | options)


def close(x, y, tolerance=1e-11):
    return x.shape == y.shape and (x - y).abs().max().item() < tolerance


def marks(*rows, t=T):
    return torch.stack([torch.isin(torch.arange(t), torch.tensor(row)) for row in rows])


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_window_and_global_tokens_are_softmax_under_a_mask(sinks):
    """Each row of the batch has tokens of its own, near the edges of chunks and windows; a row may have none."""
    (q, k, v), places = tensors(b=3), marks([0, 63, 64, 149], [70], [])
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    seen = (distance < 7) | (torch.arange(T) < sinks) | places[:, :, None] | places[:, None, :]
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    assert close(both_sides(q, k, v, None, sinks=sinks, global_tokens=places), expected)


@pytest.mark.parametrize("slots", [0, 4])
def test_global_tokens_see_all_and_are_estimated_for_none(slots):
    (q, k, v), places = tensors(), torch.tensor([0, 140, 140])
    o, share = both_sides(q, k, v, slots=slots, global_tokens=places, return_far_share=True)
    exact = softmax_attention(q, k, v, causal=False)
    assert close(o[:, :, places], exact[:, :, places])
    assert (share[:, :, places] == 0).all()
    assert (share[:, :, 1:140] > 0).all()
    changed = v.clone()
    changed[:, :, 140] += 1
    assert ((both_sides(q, k, changed, slots=slots, global_tokens=places) - o).abs() > 0).all()


def test_none_is_as_if_there_were_no_such_option():
    q, k, v = tensors()
    whole = both_sides(q, k, v, sinks=2)
    assert close(both_sides(q, k, v, sinks=2, global_tokens=torch.zeros(2, T, dtype=torch.bool)), whole)
    assert close(both_sides(q, k, v, sinks=2, global_tokens=torch.tensor([], dtype=torch.int64)), whole)
    assert close(both_sides(q, k, v, sinks=2, global_tokens=torch.tensor([T, T + 5])), whole)
    assert close(both_sides(q, k, v, sinks=2, exact_queries=torch.tensor([], dtype=torch.int64)), whole)


def test_where_all_are_global_this_is_softmax():
    q, k, v = tensors()
    o = both_sides(q, k, v, global_tokens=torch.ones(2, T, dtype=torch.bool))
    assert close(o, softmax_attention(q, k, v, causal=False))


def test_first_global_tokens_are_sinks_that_see_all():
    q, k, v = tensors()
    o, sinks = both_sides(q, k, v, global_tokens=torch.tensor([0, 1])), both_sides(q, k, v, sinks=2)
    assert close(o[:, :, 2:], sinks[:, :, 2:])
    assert not close(o[:, :, :2], sinks[:, :, :2], 1e-3)


@pytest.mark.parametrize("slots", [0, 4])
def test_places_count_the_tokens_of_each_sequence(slots):
    """Padding is cut away, packed sequences are a loop, and a mask says the same as places do."""
    q, k, v = tensors(b=1)
    options = {"slots": slots, "sinks": 1, "global_tokens": torch.tensor([2, 45])}
    cuts = [0, 5, 5, 60, 110, 150]
    packed = both_sides(q, k, v, cu_seqlens=torch.tensor(cuts), **options)
    marked = marks([a + i for a, b in pairwise(cuts) for i in (2, 45) if a + i < b])
    assert close(both_sides(q, k, v, cu_seqlens=torch.tensor(cuts), **options | {"global_tokens": marked}), packed)
    for a, b in pairwise(cuts):
        if a < b:
            assert close(packed[:, :, a:b], both_sides(*(x[:, :, a:b] for x in (q, k, v)), **options))
    mask = torch.rand(1, T, generator=torch.Generator().manual_seed(2)) > 0.3
    padded, (real,) = both_sides(q, k, v, key_mask=mask, **options), mask
    alone = both_sides(*(x[:, :, real] for x in (q, k, v)), **options)
    assert close(padded[:, :, real], alone)
    assert (padded[:, :, ~real] == 0).all()
    at = torch.zeros(1, T, dtype=torch.bool)
    at[0, real.nonzero()[torch.tensor([2, 45]), 0]] = True
    for junk in (at, at | ~mask):  # marks at padding are nothing
        assert close(both_sides(q, k, v, key_mask=mask, **options | {"global_tokens": junk}), padded)


@pytest.mark.parametrize("phi", [PHI, None])
def test_low_precision(phi):
    (q, k, v), places = tensors(), marks([0, 90], [33])
    exact = both_sides(q, k, v, phi, global_tokens=places)
    assert close(both_sides(*tensors(dtype=torch.float32), phi, global_tokens=places).double(), exact, 1e-5)
    assert close(both_sides(*tensors(dtype=torch.bfloat16), phi, global_tokens=places).double(), exact, 0.05)


def test_not_finite_numbers_show_where_they_are_used():
    (q, k, v), places = tensors(b=1), torch.tensor([100])
    near = torch.zeros(T, dtype=torch.bool)
    near[44:57] = True
    far = v.clone()
    far[:, :, 50] = torch.nan
    o = both_sides(q, k, far, None, global_tokens=places)
    assert (o.isnan().all(-1)[0, 0] == (near | (torch.arange(T) == 100))).all()
    v[:, :, 100] = torch.inf
    assert both_sides(q, k, v, None, global_tokens=places).isnan().all()


def test_gradients_through_global_tokens_and_to_them():
    q, k, v = (x.requires_grad_() for x in tensors(b=2, g=1, t=7))
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    places = marks([1, 6], [3, 5], t=7)

    def attend(q, k, v):
        return both_sides(q, k, v, window=2, key_mask=mask, global_tokens=places)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


@pytest.mark.compile
def test_a_graph_does_not_hold_how_many_there_are():
    """torch.compile breaks the graph there; asked for a whole one it says why not."""
    tensors_of_a_call, places = tensors(dtype=torch.float32, t=20), marks([3], [3, 8], t=20)

    def f(q, k, v, places):
        return both_sides(q, k, v, tarnn.Elu(), global_tokens=places)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"counts its global tokens.*fullgraph=True leave out global_tokens"):
        torch.compile(f, fullgraph=True, backend="eager")(*tensors_of_a_call, places)
    with pytest.raises(ValueError, match="counts its global tokens"):
        torch.export.export(Whole(f), (*tensors_of_a_call, places))
    found = torch.compile(f, backend="eager")(*tensors_of_a_call, places)
    assert close(found, f(*tensors_of_a_call, places), 1e-5)


class Whole(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *given):
        return self.f(*given)
