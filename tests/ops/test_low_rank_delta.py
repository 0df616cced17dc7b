"""The delta rule of low rank against its definition: outputs, states, gradients, precision, what is not finite."""

import pytest
import torch
from support.delta_calls import DECAYS, low_rank_defined as expected, low_rank_inputs as inputs
from support.drawn_calls import excess
from torch import Tensor
from torch.nn.functional import normalize

from tarnn.kernels.cpu import library
from tarnn.ops import DeltaState, low_rank_delta_rule
from tarnn.ops.delta.definition import low_rank_delta


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("t", "d", "e"), [(0, 5, 7), (1, 5, 7), (16, 8, 3), (37, 5, 7), (65, 1, 1), (130, 17, 33)])
def test_outputs_and_states_are_those_of_the_definition(decay, t, d, e):
    tensors = inputs(t=t, d=d, e=e, decay=decay)
    S = torch.randn(2, 3, d, e).double()
    o, state = low_rank_delta_rule(**tensors, state=DeltaState(S), return_state=True)
    expected_o, expected_S = expected(tensors, S=S)
    close(o, expected_o)
    close(state.S, expected_S)
    o = low_rank_delta_rule(**tensors, scale=0.7)
    close(o, expected(tensors, scale=0.7)[0])


@pytest.mark.parametrize("block", range(0, 60, 20))
def test_drawn_calls(block):
    """`python tests/fuzz.py "low rank"` draws thousands."""
    assert [number for number in range(block, block + 20) if excess("low rank", number) > 1] == []


@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("g", [-5.0, -1e6, -torch.inf])
def test_strong_decays_overflow_nothing(decay, g):
    """e^(−G) of 32 tokens with g = −5 is no float32."""
    tensors = {name: x.float() for name, x in inputs(t=100, decay=decay).items()}
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], g)
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    o, state = low_rank_delta_rule(**tensors, return_state=True)
    exact_o, exact_S = expected({name: x.double() for name, x in tensors.items()})
    torch.testing.assert_close(o.double(), exact_o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.S.double(), exact_S, rtol=1e-5, atol=1e-5)
    for grad in torch.autograd.grad(o.square().sum(), tensors.values()):
        assert grad.isfinite().all()


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equal_keys(decay, beta):
    """With products of powers of A in the place of substitution, errors are of the size of 10⁹."""
    tensors = inputs(t=150, d=8, decay=decay, strength=1e-3)
    torch.manual_seed(0)
    key = normalize(torch.randn(8, dtype=torch.float64), dim=0).expand(2, 3, 150, 8)
    tensors |= {"k": beta * key, "a": -key, "b": beta * key}
    exact, _ = expected(tensors)
    single = {name: x.float() for name, x in tensors.items()}
    naive, _ = expected(single)
    o = low_rank_delta_rule(**single)
    rounding = 1e-4 * exact.abs().max()  # by chunks, what is read and what is written cancel as sums
    assert (o - exact).abs().max() <= 2 * (naive - exact).abs().max() + rounding


def test_zero_keys_write_nothing():
    tensors = inputs()
    tensors |= {name: torch.zeros_like(tensors[name]) for name in ("k", "b")}
    o, state = low_rank_delta_rule(**tensors, return_state=True)
    assert not o.any()
    assert not state.S.any()


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "log_decay"])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_where_it_is_used_and_not_before(name, junk, chunks):
    tensors = {name: x.float() for name, x in inputs(t=75).items()}
    clean, end = low_rank_delta_rule(**tensors, return_state=True)
    tensors[name] = tensors[name].clone()
    tensors[name][1, 2, 40, 3] = junk
    o, state = low_rank_delta_rule(**tensors, return_state=True)
    spoilt = torch.zeros(o.shape[:3], dtype=torch.bool)
    spoilt[1, 2, 40 : 41 if name == "q" else None] = True
    assert (~o.isfinite()).any(-1)[spoilt].all()
    assert torch.equal(o[~spoilt], clean[~spoilt])
    if name != "q":
        assert (~state.S[1, 2].isfinite()).any()
    assert torch.equal(state.S[0], end.S[0])


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 300, 301, 301, 700]])
def test_gradients_of_several_segments_are_those_of_the_definition(decay, cu_seqlens):
    """A state is kept in 256 tokens; packed sequences count their own."""
    tensors = inputs(1, 2, 700, 5, 3, decay, strength=0.1)
    tensors["S"] = torch.randn(1 if cu_seqlens is None else 4, 2, 5, 3).double()
    grad = torch.randn(1, 2, 700, 3).double()

    def gradients(f):
        given = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        S = given.pop("S")
        return torch.autograd.grad(f(S, **given), [*given.values(), S], grad)

    def ours(S, **given):
        packing = None if cu_seqlens is None else torch.tensor(cu_seqlens)
        return low_rank_delta_rule(**given, state=DeltaState(S), cu_seqlens=packing)

    def definition(S, **given):
        cuts = cu_seqlens or [0, 700]
        parts = [
            low_rank_delta(**{name: x[:, :, i:j] for name, x in given.items()}, scale=5**-0.5, S=S[n : n + 1])[0]
            for n, (i, j) in enumerate(zip(cuts, cuts[1:]))
        ]
        return torch.cat(parts, 2)

    for x, y in zip(gradients(ours), gradients(definition)):
        close(x, y)


def test_the_prompt_may_be_cut_at_multiples_of_the_chunk():
    """To the bit, by the compiled kernels, which take one token after the other."""
    tensors = inputs(t=192, dtype=torch.float32)
    whole, end = low_rank_delta_rule(**tensors, return_state=True)
    parts = [{name: x[:, :, at] for name, x in tensors.items()} for at in (slice(0, 64), slice(64, None))]
    first, state = low_rank_delta_rule(**parts[0], return_state=True)
    rest, state = low_rank_delta_rule(**parts[1], state=state, return_state=True)
    same = torch.equal if library.available() else torch.allclose
    assert torch.equal(first, whole[:, :, :64]) or not library.available()
    assert same(rest, whole[:, :, 64:]) if library.available() else torch.allclose(rest, whole[:, :, 64:], atol=1e-5)
    assert torch.allclose(state.S, end.S, atol=1e-5)


def test_no_token_has_a_graph_too():
    """Ranks that share a sequence may have none of it, and still take part in the backward pass."""
    q, k, v, a, b = (torch.randn(1, 2, 0, 4).double().requires_grad_() for _ in range(5))
    o, state = low_rank_delta_rule(q, k, v, a, b, return_state=True)
    assert o.shape == (1, 2, 0, 4)
    torch.testing.assert_close(state.S, torch.zeros(1, 2, 4, 4).double(), check_stride=False)
    assert o.requires_grad
    assert state.S.requires_grad
