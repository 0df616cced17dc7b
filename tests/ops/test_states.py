"""One suite of laws over every kind of state: a new kind is tested by adding a row."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch.utils import _pytree as pytree

from tarnn.models import ModelState
from tarnn.models.images import ImageState
from tarnn.ops import KVCache, LinearState, NoState

pytestmark = pytest.mark.one_path


def linear(b, weighted=False):
    x = torch.randn(b, 2, 5, 3), torch.rand(b, 2, 5)
    return LinearState(*x, torch.randn(b, 2)) if weighted else LinearState(*x)


def cache(b, masked=False, length=4):
    empty = KVCache.empty(b, 2, 7, 5, 3)
    mask = torch.rand(b, length) > 0.3 if masked else None
    return empty.append(torch.randn(b, 2, length, 5), torch.randn(b, 2, length, 3), mask)


def layers(b):
    return (linear(b), cache(b), NoState(), cache(b, masked=True), linear(b, weighted=True))


KINDS = {
    "none": lambda b: NoState(),
    "linear": linear,
    "weighted": lambda b: linear(b, weighted=True),
    "cache": cache,
    "masked cache": lambda b: cache(b, masked=True),
    "model": lambda b: ModelState(layers(b), torch.arange(b)),
    "images": lambda b: ImageState(layers(b), torch.arange(b), torch.randn(b, 11)),
}


@pytest.fixture(params=KINDS)
def make(request):
    torch.manual_seed(0)
    return KINDS[request.param]


def same(state, other):
    """The same kind, names and numbers."""
    mine, theirs = state.tensors(), other.tensors()
    return (
        type(state) is type(other)
        and mine.keys() == theirs.keys()
        and all(torch.equal(x, theirs[name]) for name, x in mine.items())
    )


def test_selecting_twice_is_selecting_once(make):
    state, first, then = make(5), torch.tensor([4, 0, 0, 2]), torch.tensor([3, 1])
    assert same(state.select(first).select(then), state.select(first[then]))
    for name, x in state.select(first).tensors().items():
        assert torch.equal(x, state.tensors()[name][first])


def test_what_was_inserted_is_found_and_the_rest_stays(make):
    state, other, rows = make(5), make(2), torch.tensor([3, 0])
    both = state.insert(rows, other)
    assert same(both.select(rows), other)
    others = torch.tensor([1, 2, 4])
    assert same(both.select(others), state.select(others))


def test_a_copy_is_independent_and_a_value_is_frozen(make):
    state = make(3)
    copy, kept = state.clone(), state.clone()
    for x in pytree.tree_leaves(copy):
        if isinstance(x, torch.Tensor):
            assert x.is_contiguous()
            x.zero_()
    assert same(state, kept)
    for field in fields(state):
        with pytest.raises(FrozenInstanceError):
            setattr(state, field.name, None)


def test_it_is_a_pytree_and_no_tuple(make):
    state = make(3)
    leaves, spec = pytree.tree_flatten(state)
    assert same(pytree.tree_unflatten(leaves, spec), state)
    assert same(state.map(lambda x: x), state)
    assert not isinstance(state, tuple)
    assert None not in leaves  # torch.func takes tensors only


def test_moving_keeps_it_and_bytes_are_counted(make):
    state = make(3)
    assert same(state.to("cpu"), state)
    assert state.to("meta").nbytes == state.nbytes
    assert make(6).nbytes == 2 * state.nbytes
    used = sum(x.nbytes for x in state.tensors().values())
    assert 0 <= used
    assert all(name in repr(state) for name in state.tensors())


def test_another_kind_is_refused(make):
    state, rows = make(3), torch.tensor([0])
    for other in (kind(1) for kind in KINDS.values()):
        if type(other) is not type(state):
            with pytest.raises(ValueError, match="of its own kind"):
                state.insert(rows, other)


def test_names_of_a_models_tensors():
    state = KINDS["images"](1)
    assert list(state.tensors()) == [
        "layers.0.S",
        "layers.0.z",
        "layers.1.k",
        "layers.1.v",
        "layers.3.k",
        "layers.3.v",
        "layers.3.mask",
        "layers.4.S",
        "layers.4.z",
        "layers.4.M",
        "position",
        "condition",
    ]
    assert state.tensors()["layers.1.k"].shape == (1, 2, 4, 5)  # what is used of it


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_another_length_are_masked(masked):
    """What a server does: a sequence that came later takes a free row beside longer and shorter ones."""
    from tarnn.ops import softmax_step

    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 1, 5), torch.randn(5, 2, 1, 5), torch.randn(5, 2, 1, 3)
    for mine, theirs in ((4, 2), (2, 4)):
        state, other, rows = cache(5, masked, mine), cache(2, length=theirs), torch.tensor([3, 0])
        o, _ = softmax_step(q, k, v, state.insert(rows, other))
        others = torch.tensor([1, 2, 4])
        for index, alone in ((rows, other), (others, state.select(others))):
            expected, _ = softmax_step(q[index], k[index], v[index], alone)
            torch.testing.assert_close(o[index], expected)


def test_appending_by_value_and_in_place_hold_the_same():
    torch.manual_seed(0)
    state, (k, v) = cache(2), (torch.randn(2, 2, 2, 5), torch.randn(2, 2, 2, 3))
    kept = state.clone()
    first, second = state.append(k, v), state.append(-k, v, torch.tensor([[True, False]]).expand(2, 2))
    assert torch.equal(first.tensors()["k"], torch.cat([kept.tensors()["k"], k], dim=2))
    assert torch.equal(second.tensors()["k"], torch.cat([kept.tensors()["k"], -k], dim=2))
    assert second.mask[:, :6].tolist() == [[True] * 5 + [False]] * 2
    assert same(state, kept)
    inplace = state.append(k, v, inplace=True)
    assert same(inplace, first)
    assert same(state, kept)  # what it held it still holds: only its room was written
    assert inplace.k.data_ptr() == state.k.data_ptr()
    assert first.capacity == second.capacity == state.capacity


def test_gradients_flow_through_a_cache_by_value():
    torch.manual_seed(0)
    k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def f(k, v):
        state = KVCache.empty(1, 1, 4, 2, dtype=torch.float64)
        for i in range(3):
            state = state.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        return state.tensors()["k"].exp() * state.tensors()["v"]

    assert torch.autograd.gradcheck(f, (k, v))


def test_torch_func_sees_through_it():
    state = linear(2)
    grad = torch.func.grad(lambda s: (s.S**2).sum() + s.z.sum())(state)
    assert isinstance(grad, LinearState)
    torch.testing.assert_close(grad.S, 2 * state.S)
    assert grad.M is None


@pytest.mark.compile
def test_torch_compile_and_export_take_and_give_states():
    class Twice(torch.nn.Module):
        def forward(self, state):
            return state.map(lambda x: 2 * x)

    state = KINDS["model"](2)
    for run in (
        torch.compile(lambda s: ModelState(s.layers, 2 * s.position), fullgraph=True, backend="eager"),
        torch.export.export(Twice(), (state,)).module(),
    ):
        assert torch.equal(run(state).position, 2 * state.position)


def test_autograd_sees_what_is_written_in_place():
    from tarnn.ops import softmax_attention, softmax_step

    q, k = torch.randn(1, 1, 3, 2, requires_grad=True), torch.randn(1, 1, 3, 2)
    own = KVCache.empty(1, 1, 6, 2)
    _, own = softmax_attention(q, k, k, causal=True, state=own, return_state=True, inplace=True)
    o, own = softmax_step(q[:, :, :1], k[:, :, :1], k[:, :, :1], own, inplace=True)
    softmax_step(q.detach()[:, :, :1], k[:, :, :1], k[:, :, :1], own, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
